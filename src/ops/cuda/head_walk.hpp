#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/error.hpp"
#include "ops/cuda/head_pieces.hpp"
#include "ops/cuda/lane_ring.hpp"

/// How warps share out the heads and tokens of all groups of a call, and how one walks over its tokens.
namespace layerstream::ops::detail {

/// The groups of a call; their sets of heads follow each other.
template <class Group>
struct HeadGroups {
  Group groups[most_head_groups];
  std::int32_t first_set[most_head_groups];  ///< of each
  std::int32_t count, sets, tokens_at_once;  ///< groups; sets of all; of a warp's tokens, the fewest
  HeadTeams teams;

  HeadGroups() : groups{}, first_set{}, count(0), sets(0), tokens_at_once(cuda::warp_lanes), teams{} {}
  void add(const Group& group) {
    groups[count] = group;
    first_set[count++] = sets;
    sets += group.runs.sets();
    tokens_at_once = std::min(tokens_at_once, group.runs.tokens);
  }
  /// @pre all groups are there. @param most_warps of a team, @param most_blocks at least 1
  void share_out(int most_warps, std::int64_t most_blocks) {
    const int fewest = (sets + most_warps - 1) / most_warps;
    for (int splits = fewest; splits <= std::min(sets, fewest + 2); ++splits) {
      const int slots = most_slots(splits, most_warps);
      // Tokens that are under way in a team, on average over the teams that share them.
      if (slots * teams.splits > teams.most_slots() * splits) take(splits, slots, most_warps);
    }
    const std::int64_t units = (groups[0].args.tokens + tokens_at_once - 1) / tokens_at_once;
    const int slots = teams.most_slots();
    teams.blocks = static_cast<std::int32_t>(
        std::min({(units + slots - 1) / slots, std::max<std::int64_t>(most_head_teams / teams.splits, 1),
                  most_blocks}));
  }

 private:
  /// How many sets a team has.
  struct TeamSets {
    int heavy = 0, light = 0;
    int warps(int slots, int light_slots) const { return heavy * slots + light * light_slots; }
  };

  /// Beside others: half their warps keep up with them.
  bool is_light(int group) const {
    const std::span present(groups, static_cast<std::size_t>(count));
    return groups[group].is_light() && !std::ranges::all_of(present, &Group::is_light);
  }
  TeamSets sets_of(int team, int splits) const {
    TeamSets of_team;
    int group = 0;
    for (int set = team; set < sets; set += splits) {
      while (group + 1 < count && set >= first_set[group + 1]) ++group;
      ++(is_light(group) ? of_team.light : of_team.heavy);
    }
    return of_team;
  }
  int most_slots(int splits, int most_warps) const {
    int slots = most_warps;
    for (int team = 0; team < splits; ++team) {
      const TeamSets of_team = sets_of(team, splits);
      while (of_team.warps(slots, (slots + 1) / 2) > most_warps) --slots;
    }
    return slots;
  }
  /// Light sets get what the others leave, up to as many slots as they have.
  void take(int splits, int slots, int most_warps) {
    int light_slots = slots;
    for (int team = 0; team < splits; ++team) {
      const TeamSets of_team = sets_of(team, splits);
      while (of_team.warps(slots, light_slots) > most_warps) --light_slots;
    }
    teams.splits = splits;
    teams.warps = 0;
    for (int team = 0; team < splits; ++team) {
      teams.warps = std::max(teams.warps, sets_of(team, splits).warps(slots, light_slots));
    }
    for (int group = 0; group < count; ++group) teams.slots[group] = is_light(group) ? light_slots : slots;
  }
};

/// Elements between two tokens. @throws ContractError for what a walk does not count: more than 2^28 of them,
/// more than 2^30 tokens or heads.
inline std::uint32_t head_stride(const char* operation, std::int64_t tokens, std::int64_t heads,
                                 std::int64_t elements) {
  constexpr std::int64_t most = std::int64_t{1} << 30, most_elements = most / 4;
  LAYERSTREAM_EXPECT(
      tokens <= most && heads <= most && elements <= most_elements,
      "{}: {} tokens of {} heads, rows of {} elements; the kernel counts up to {} and rows of {}", operation,
      tokens, heads, elements, most, most_elements);
  return static_cast<std::uint32_t>(elements);
}

#if defined(__CUDACC__)

/// Where a warp is among those of its team and its team among all. A warp that nothing is left for has a set
/// after the last of its group, which is one of no heads, and any slot: what it adds up is not written.
struct HeadPlace {
  int group = 0;
  std::int32_t block;        ///< of tokens
  std::int32_t slot, slots;  ///< of the set
  std::int32_t set;          ///< in its group

  template <class Group>
  __device__ explicit HeadPlace(const HeadGroups<Group>& args) {
    const HeadTeams& teams = args.teams;
    const auto team = static_cast<std::int32_t>(blockIdx.x);
    // Of lane 0, so that the compiler knows that it is the same on all lanes.
    slot = static_cast<std::int32_t>(__shfl_sync(cuda::all_lanes, threadIdx.x / cuda::warp_lanes, 0));
    block = team / teams.splits;
    std::int32_t of_all = team % teams.splits;
    for (;; of_all += teams.splits, slot -= slots) {
      while (group + 1 < args.count && of_all >= args.first_set[group + 1]) ++group;
      slots = teams.slots[group];
      if (slot < slots || of_all >= args.sets) break;
    }
    set = of_all - args.first_set[group];
  }
};

/// To an address of global memory, so that the compiler knows that it is one.
template <class V>
__device__ V* global_pointer(std::size_t address) {
  return static_cast<V*>(__cvta_global_to_generic(address));
}

/// Of a launch's arguments, alike on all lanes of a warp, in registers: the compiler would otherwise read it
/// again at each use, which takes long at an address that it does not know.
template <class V>
__device__ V held_argument(V value) {
  return __shfl_sync(cuda::all_lanes, value, 0);
}
template <class V>
__device__ V* held_argument(V* pointer) {
  return global_pointer<V>(held_argument(__cvta_generic_to_global(pointer)));
}

/// A matrix with a row for each token.
template <class V>
class HeadRows {
 public:
  /// @param stride elements between tokens, @param first the caller's element of a row
  __device__ HeadRows(V* matrix, std::uint32_t stride, std::uint32_t first)
      : first_(__cvta_generic_to_global(held_argument(matrix) + first)),
        stride_(held_argument(stride) * static_cast<std::uint32_t>(sizeof(V))) {}
  __device__ V* at(std::uint32_t token) const {
    return global_pointer<V>(first_ + std::uint64_t{token} * stride_);
  }

 private:
  std::size_t first_;     ///< address
  std::uint32_t stride_;  ///< bytes
};

/// One warp's walk over every so many-th token with one set of a group's heads, of which a lane has up to K
/// pieces of either half. The angles of a token's rope are read while those of the one before are used; with
/// Brings they are brought to the level-2 cache some tokens before, as they come from memory no faster than
/// anything else. It pays where a token is long enough to work on for the fewer warps that fit.
template <class Group, class A, int W, int K, bool Brings, bool Whole>
class HeadWalk {
 public:
  /// Whether rounds have a position, see end_round.
  static constexpr bool wants_positions = Brings;

  __device__ HeadWalk(const Group& group, const HeadTeams& teams, const HeadPlace& place)
      : group_(group),
        lanes_(held_argument(group.runs.lanes)),
        half_(held_argument(static_cast<std::uint32_t>(group.runs.half))),
        tokens_(held_argument(static_cast<std::uint32_t>(group.args.tokens))),
        positions_(held_argument(group.args.parts.positions)) {
    const HeadRuns& runs = group.runs;
    const int lane = static_cast<int>(threadIdx.x) % cuda::warp_lanes;
    const std::int32_t head = place.set * runs.heads + runs.head(lane), piece = runs.piece(lane);
    piece_ = static_cast<std::uint32_t>(piece);
    first_ = static_cast<std::uint32_t>(head * group.args.head_dim + piece * W);
    cos_ = held_argument(group.args.parts.cos) + in_head();
    sin_ = held_argument(group.args.parts.sin) + in_head();
    // Lanes without elements take part in the sums of their warp.
    const bool exists = head < runs.all_heads && piece < runs.pieces;
    step_ = static_cast<std::uint32_t>(teams.blocks * place.slots * runs.tokens);
    of_warp_ = static_cast<std::uint32_t>((place.block * place.slots + place.slot) * runs.tokens);
    token_ = exists ? of_warp_ + static_cast<std::uint32_t>(runs.token(lane)) : no_token;
  }

  /// With the round of the token `ahead` steps from now: asks for the position that turn() will want then,
  /// and ends the round.
  template <class Ring>
  __device__ void end_round(int ahead, Ring& ring) const {
    if constexpr (Brings) {
      const std::uint32_t later = token(ahead + positions_ahead);
      if (positions_ != nullptr && is_there(later)) ring.ask(positions_ + later);
    }
    ring.end_round();
  }
  /// Asks for the first angles; best after the first rounds.
  __device__ void ask_for_rope() {
    read_rope(token(), position_of(token()));
#pragma unroll
    for (int i = 0; i + 1 < positions_ahead; ++i) {
      next_[i] = position_of(token(i + 1));
      if constexpr (Brings) bring_rope(token(i + 1), next_[i]);
    }
  }

  __device__ bool has_piece() const {
    return token_ != no_token;
  }
  /// Until the warp has no more tokens.
  __device__ bool goes_on() const {
    return of_warp_ < tokens_;
  }
  __device__ void advance() {
    of_warp_ += step_;
    token_ += step_;
  }

  /// The lane's token `ahead` steps from now.
  __device__ std::uint32_t token(int ahead = 0) const {
    return token_ + static_cast<std::uint32_t>(ahead) * step_;
  }
  __device__ bool is_there(std::uint32_t token) const {
    return token < tokens_;
  }
  /// Of a lane that has a first piece.
  __device__ bool has(int k) const {
    return k == 0 || piece_ + k * lanes_ < static_cast<std::uint32_t>(group_.runs.pieces);
  }
  /// From the lane's first piece on: element in_heads() of a token's heads, in_head() of what heads share.
  __device__ HeadPair<W, Whole> pair(int k) const {
    auto pieces = group_.runs.template pair<W, Whole>(piece_ + k * lanes_, group_.args.head_dim);
    pieces.lower.first = k * lanes_ * W;
    pieces.upper.first = half_ + pieces.lower.first;
    return pieces;
  }
  __device__ std::uint32_t in_heads() const {
    return first_;
  }
  __device__ std::uint32_t in_head() const {
    return piece_ * W;
  }
  /// Lanes of a head, a power of two.
  __device__ int lanes() const {
    return lanes_;
  }
  template <class V>
  __device__ HeadRows<V> rows(V* matrix, std::uint32_t stride) const {
    return HeadRows<V>(matrix, stride, first_);
  }

  /// Rotates by the token's angles, or back, and asks for those of the next token.
  /// @param position that the token's round has
  template <bool Back>
  __device__ void turn(std::int32_t position, Values<A, W> (&low)[K], Values<A, W> (&high)[K]) {
    if (positions_ == nullptr) return;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if constexpr (Back) {
        rope_[k].turn_back(low[k], high[k]);
      } else {
        rope_[k].turn(low[k], high[k]);
      }
    }
    read_rope(token(1), next_[0]);
    if constexpr (Brings) {
#pragma unroll
      for (int i = 0; i + 2 < positions_ahead; ++i) next_[i] = next_[i + 1];
      next_[positions_ahead - 2] = static_cast<std::uint32_t>(position);
      bring_rope(token(positions_ahead), next_[positions_ahead - 2]);
    } else {
      next_[0] = position_of(token(2));
    }
  }

 private:
  /// More than there are, also when a lane's step is added as often as it has tokens.
  static constexpr std::uint32_t no_token = std::uint32_t{1} << 31;
  static constexpr int positions_ahead = Brings ? 3 : 2;

  __device__ std::uint32_t position_of(std::uint32_t token) const {
    return positions_ != nullptr && is_there(token) ? static_cast<std::uint32_t>(positions_[token]) : 0;
  }
  __device__ void read_rope(std::uint32_t token, std::uint32_t position) {
    if (positions_ == nullptr || !is_there(token)) return;
    // In 32 bits, as ops/heads.cpp bounds the tables.
    const std::uint32_t angles = position * half_;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!has(k)) continue;
      const auto piece = pair(k).lower;
      rope_[k] = {load_piece(piece, cos_ + angles), load_piece(piece, sin_ + angles)};
    }
  }
  __device__ void bring_rope(std::uint32_t token, std::uint32_t position) const {
    if (positions_ == nullptr || !is_there(token)) return;
    const std::uint32_t angles = position * half_;
    bring(cos_ + angles);
    bring(sin_ + angles);
  }
  __device__ static void bring(const A* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
  }

  const Group& group_;
  std::int32_t lanes_;
  std::uint32_t half_, tokens_;
  const std::int32_t* positions_;
  const A *cos_, *sin_;          ///< from the lane's first piece on
  std::uint32_t piece_, first_;  ///< of a half; element of a token that it begins at
  std::uint32_t of_warp_, token_, step_;
  std::uint32_t next_[positions_ahead - 1];  ///< positions of the next tokens
  Rope<A, W> rope_[K];                       // anything for a token that is not there
};

#endif

}  // namespace layerstream::ops::detail
