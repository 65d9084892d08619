#pragma once

#include <algorithm>
#include <initializer_list>

#include "ops/cuda/held_piece.hpp"
#include "ops/detail/head_parts.hpp"
#include "ops/detail/launch.hpp"
#include "ops/heads.hpp"

/// How the heads of tokens fall to the lanes of a CUDA device. A run of neighbouring lanes (a power of two)
/// has one head of one token: a lane holds a piece of the lower half of the head and the piece that rope
/// pairs with it in the upper half. The runs of a warp have neighbouring heads of one token, or, where there
/// are fewer heads than runs, of several tokens.
namespace layerstream::ops::detail {

/// What a lane has of one head.
template <class T, int N, bool Whole>
struct HeldHead {
  HeldPiece<T, N, Whole> low, high;
};

/// Where a lane's numbers are in a head.
template <int W, bool Whole>
struct HeadPair {
  Piece<W, Whole> lower, upper;

  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION void load(const T* row, Values<MathOf<T>, W>& low,
                                        Values<MathOf<T>, W>& high) const {
    low = load_piece(lower, row);
    high = load_piece(upper, row);
  }
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION void store(T* row, const Values<MathOf<T>, W>& low,
                                         const Values<MathOf<T>, W>& high) const {
#if defined(__CUDA_ARCH__)
    store_stored(lower, row, cuda::round_to_stored<T>(low));
    store_stored(upper, row, cuda::round_to_stored<T>(high));
#else
    store_piece(lower, row, low);
    store_piece(upper, row, high);
#endif
  }
  template <class A>
  KOKKOS_FORCEINLINE_FUNCTION void add(const A* row, Values<A, W>& low, Values<A, W>& high) const {
    Values<A, W> more_low, more_high;
    load(row, more_low, more_high);
    for (int e = 0; e < W; ++e) {
      low.at[e] += more_low.at[e];
      high.at[e] += more_high.at[e];
    }
  }
};

/// The angles of one piece at one position.
template <class A, int W>
struct Rope {
  Values<A, W> cos, sin;

  template <class T, bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION void read(const HeadParts<T>& parts, std::int64_t position, std::int64_t half,
                                        const Piece<W, Whole>& piece) {
    cos = load_piece(piece, parts.cos + position * half);
    sin = load_piece(piece, parts.sin + position * half);
  }
  KOKKOS_FORCEINLINE_FUNCTION void turn(Values<A, W>& low, Values<A, W>& high) const {
    for (int e = 0; e < W; ++e) {
      const A a = low.at[e], b = high.at[e];
      low.at[e] = Kokkos::fma(a, cos.at[e], -(b * sin.at[e]));
      high.at[e] = Kokkos::fma(b, cos.at[e], a * sin.at[e]);
    }
  }
  KOKKOS_FORCEINLINE_FUNCTION void turn_back(Values<A, W>& low, Values<A, W>& high) const {
    for (int e = 0; e < W; ++e) {
      const A a = low.at[e], b = high.at[e];
      low.at[e] = Kokkos::fma(a, cos.at[e], b * sin.at[e]);
      high.at[e] = Kokkos::fma(b, cos.at[e], -(a * sin.at[e]));
    }
  }
};

/// How heads fall to the runs of a warp.
struct HeadRuns {
  std::int64_t half;       ///< elements of the lower half; the upper one may have one less
  std::int32_t pieces;     ///< of a half
  std::int32_t lanes;      ///< of a run
  std::int32_t heads;      ///< of one token in a warp: a set, a power of two
  std::int32_t tokens;     ///< of a warp
  std::int32_t all_heads;  ///< of a token

  static HeadRuns of(std::int64_t heads, std::int64_t head_dim, int width) {
    HeadRuns runs{(head_dim + 1) / 2, 0, 1, 1, 1, static_cast<std::int32_t>(heads)};
    runs.pieces = static_cast<std::int32_t>((runs.half + width - 1) / width);
    while (runs.lanes < runs.pieces && runs.lanes < cuda::warp_lanes) runs.lanes *= 2;
    const int of_warp = cuda::warp_lanes / runs.lanes;
    while (runs.heads < heads && runs.heads < of_warp) runs.heads *= 2;
    runs.tokens = of_warp / runs.heads;
    return runs;
  }
  /// Sets of heads of a token: what a warp has of it at once.
  KOKKOS_FORCEINLINE_FUNCTION std::int32_t sets() const { return (all_heads + heads - 1) / heads; }

  /// The place of a lane in its run, and of the run's head and token among those of the warp.
  /// Without divisions, as all three counts are powers of two: a warp has lanes * heads * tokens lanes.
  KOKKOS_FORCEINLINE_FUNCTION std::int32_t piece(int lane) const { return lane & (lanes - 1); }
  KOKKOS_FORCEINLINE_FUNCTION std::int32_t head(int lane) const {
    return lane % cuda::warp_lanes * heads * tokens / cuda::warp_lanes & (heads - 1);
  }
  KOKKOS_FORCEINLINE_FUNCTION std::int32_t token(int lane) const {
    return lane % cuda::warp_lanes * tokens / cuda::warp_lanes;
  }

  template <int W, bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION HeadPair<W, Whole> pair(std::int32_t index, std::int64_t head_dim) const {
    const std::int64_t low = static_cast<std::int64_t>(index) * W, high = half + low;
    return {{low, half - low}, {high, head_dim - high}};
  }
};

/// As many teams as an H200 has multiprocessors, one on each; what they share out depends on shapes alone.
inline constexpr std::int64_t most_head_teams = 132;

/// The partial sums of all groups of a call fit twice as many rows as this of (H, d) of the largest group;
/// it does not fall with more tokens or heads. One row for each team would do for one group; a call with
/// more has fewer teams where its rows would not fit.
inline std::int64_t head_partial_rows(std::int64_t tokens) {
  return std::max<std::int64_t>(2 * std::min(tokens, most_head_teams), most_head_groups);
}

/// How the tokens and the sets of heads of all groups fall to the warps of teams: each warp keeps its set (as
/// many heads as a warp has at once), for which it has sums in registers, and takes tokens that lie equally
/// far apart. The warps for one token are in one team where they fit, so that all but the first read of its
/// angles end in the multiprocessor's own cache. Of the sets of all groups, one after the other, a team has
/// every `splits`-th.
struct HeadTeams {
  std::int32_t splits = 1;                 ///< teams that share the sets of a token
  std::int32_t warps = 0;                  ///< of a team, at most
  std::int32_t blocks = 0;                 ///< of tokens: teams for each split
  std::int32_t slots[most_head_groups]{};  ///< of tokens in a team, by group: warps for each set

  KOKKOS_FORCEINLINE_FUNCTION int lanes() const { return warps * cuda::warp_lanes; }
  KOKKOS_FORCEINLINE_FUNCTION int most_slots() const {
    std::int32_t most = 0;
    for (const std::int32_t of_group : slots) most = of_group > most ? of_group : most;
    return most;
  }
};

/// Whether the pieces of heads may be whole, see whole_pieces.
template <class T>
bool whole_heads(std::int64_t head_dim, std::initializer_list<std::int64_t> strides,
                 const HeadParts<T>& parts, std::initializer_list<const void*> pointers) {
  constexpr int width = lane_width<T>;
  return head_dim % (2 * width) == 0 && whole_pieces(width, strides, pointers) &&
         whole_pieces(width, {}, {parts.bias, parts.norm_weight, parts.cos, parts.sin});
}

}  // namespace layerstream::ops::detail
