#pragma once

#include <span>

#include "ops/cuda/head_pieces.hpp"
#include "ops/cuda/labelled_launch.hpp"

/// The head transform's forward direction on a CUDA device.
namespace layerstream::ops::detail {

/// Warps of a block: each has one share of the heads of a token.
inline constexpr int head_forward_warps = 4;

/// A group of heads in a launch for several.
template <class T>
struct HeadForwardGroup {
  HeadForward<T> args;
  HeadRuns runs;
  std::int32_t shares;  ///< warps that share the heads of a token
  std::int32_t sets;    ///< of heads in a share
};

/// Blocks are in tiles of neighbouring tokens, so that the groups' work is mixed all the time and their reads
/// of the rope's angles meet in the caches. A tile has the blocks of the first group, those of the second ...
template <class T>
struct HeadForwardGroups {
  HeadForwardGroup<T> groups[most_head_groups];
  std::uint32_t end_block[most_head_groups];  ///< of a group in its tile; of a missing one that of the last
  std::uint32_t tile_blocks;
};

#if defined(__CUDACC__)

/// What the warps of a call do. Those of `long_heads` read twice what a norm needs.
enum class HeadForwardForm { plain, norm, long_heads };

/// One warp for up to Sets sets of heads of a token (or of several, see HeadRuns): all of their reads are
/// under way at once, and the rope's angles are read once. For heads of at most one piece per lane.
template <class T, int Sets, bool Norm, bool Whole>
struct HeadForwardWarp {
  using A = MathOf<T>;
  static constexpr int width = lane_width<T>;
  using Numbers = Values<A, width>;
  const HeadForwardGroup<T>& group;
  int lane;  ///< of the warp

  __device__ void operator()(std::uint32_t item) const {
    const HeadForward<T>& args = group.args;
    const HeadRuns& runs = group.runs;
    const auto shares = static_cast<std::uint32_t>(group.shares);
    const std::int64_t token = static_cast<std::int64_t>(item / shares) * runs.tokens + runs.token(lane);
    const std::int32_t first_head =
        static_cast<std::int32_t>(item % shares) * group.sets * runs.heads + runs.head(lane);
    const std::int32_t own = runs.piece(lane);
    // Lanes without elements take part in the sums of their warp.
    const bool exists = token < args.tokens && own < runs.pieces;
    const bool has_rope = args.parts.positions != nullptr;
    const auto pair = runs.template pair<width, Whole>(own, args.head_dim);
    const std::int32_t position = exists && has_rope ? args.parts.positions[token] : 0;

    HeldHead<T, width, Whole> held[Sets] = {};
    const T* const raw = args.raw + token * args.row_stride + first_head * args.head_dim;
    const std::int64_t step = runs.heads * args.head_dim;
#pragma unroll
    for (int s = 0; s < Sets; ++s) {
      if (exists && has(s, first_head)) pair.read(raw + s * step, held[s]);
    }
    Rope<A, width> rope{};
    if (exists && has_rope) rope.read(args.parts, position, runs.half, pair.lower);
    const A* const bias = args.parts.bias == nullptr ? nullptr : args.parts.bias + first_head * args.head_dim;
    [[maybe_unused]] A inverse[Sets] = {};
    [[maybe_unused]] Numbers low_weight{}, high_weight{};
    if constexpr (Norm) {
      if (exists) pair.load(args.parts.norm_weight, low_weight, high_weight);
#pragma unroll
      for (int s = 0; s < Sets; ++s) {
        Numbers low = held[s].low.numbers(), high = held[s].high.numbers();
        if (bias != nullptr && exists && has(s, first_head)) pair.add(bias + s * step, low, high);
        for (int e = 0; e < width; ++e) {
          inverse[s] = Kokkos::fma(high.at[e], high.at[e], Kokkos::fma(low.at[e], low.at[e], inverse[s]));
        }
      }
      invert(inverse);
    }

    T* const out = args.out + (token * args.heads + first_head) * args.head_dim;
#pragma unroll
    for (int s = 0; s < Sets; ++s) {
      if (s >= group.sets) break;
      const bool live = exists && has(s, first_head);
      Numbers low, high;
      if constexpr (Norm) {
        low = cuda::widen_again(held[s].low.stored());
        high = cuda::widen_again(held[s].high.stored());
      } else {
        low = held[s].low.numbers();
        high = held[s].high.numbers();
      }
      if (live && bias != nullptr) pair.add(bias + s * step, low, high);
      if constexpr (Norm) {
        for (int e = 0; e < width; ++e) {
          low.at[e] = low_weight.at[e] * (low.at[e] * inverse[s]);
          high.at[e] = high_weight.at[e] * (high.at[e] * inverse[s]);
        }
      }
      if (has_rope) rope.turn(low, high);
      if (live) pair.store(out + s * step, low, high);
    }
  }

 private:
  __device__ bool has(int set, std::int32_t first_head) const {
    return set < group.sets && first_head + set * group.runs.heads < group.runs.all_heads;
  }
  __device__ A inverse_of(A squares) const {
    return A(1) / Kokkos::sqrt(squares * (A(1) / static_cast<A>(group.args.head_dim)) + group.args.parts.eps);
  }

  /// From a lane's parts of the sums of squares to 1 / rms. Where they can, the lanes of a run first share
  /// out the sets: each adds and inverts for one, with the bits of sum_in_run.
  __device__ void invert(A (&values)[Sets]) const {
    const int lanes = group.runs.lanes;
    if constexpr (Sets == 4) {
      if (lanes >= 4) {
        const int half = lanes / 2, quarter = lanes / 4;
        const A first = exchange(values[0], values[2], half), second = exchange(values[1], values[3], half);
        const A inverse = inverse_of(cuda::sum_in_run(exchange(first, second, quarter), quarter));
        const int run = lane & ~(lanes - 1);
#pragma unroll
        for (int s = 0; s < Sets; ++s) {
          values[s] = __shfl_sync(cuda::all_lanes, inverse, run + s / 2 * half + s % 2 * quarter);
        }
        return;
      }
    }
#pragma unroll
    for (int s = 0; s < Sets; ++s) values[s] = inverse_of(cuda::sum_in_run(values[s], lanes));
  }
  /// One of the two with that of the lane whose number differs in `offset`: the upper lane gets `high`.
  __device__ A exchange(A low, A high, int offset) const {
    const bool upper = (lane & offset) != 0;
    return (upper ? high : low) + __shfl_xor_sync(cuda::all_lanes, upper ? low : high, offset);
  }
};

/// One warp for one head of a token, of any length: what the norm needs is read twice.
template <class T, bool Whole>
struct LongHeadForwardWarp {
  using A = MathOf<T>;
  static constexpr int width = lane_width<T>;
  const HeadForwardGroup<T>& group;
  int lane;  ///< of the warp

  __device__ void operator()(std::uint32_t item) const {
    const HeadForward<T>& args = group.args;
    const HeadRuns& runs = group.runs;
    const std::int64_t row = item;
    const std::int32_t pieces = row < args.tokens * args.heads ? runs.pieces : 0;
    const std::int64_t token = row / args.heads, head = row % args.heads;
    const T* const raw = args.raw + token * args.row_stride + head * args.head_dim;
    const A* const bias = args.parts.bias == nullptr ? nullptr : args.parts.bias + head * args.head_dim;
    const bool has_norm = args.parts.norm_weight != nullptr;
    Values<A, width> low, high;
    A inverse(1);
    if (has_norm) {
      A squares{};
      for (std::int32_t i = runs.piece(lane); i < pieces; i += runs.lanes) {
        const auto pair = runs.template pair<width, Whole>(i, args.head_dim);
        pair.load(raw, low, high);
        if (bias != nullptr) pair.add(bias, low, high);
        for (int e = 0; e < width; ++e) squares += low.at[e] * low.at[e] + high.at[e] * high.at[e];
      }
      squares = cuda::sum_in_run(squares, runs.lanes);
      inverse = A(1) / Kokkos::sqrt(squares / static_cast<A>(args.head_dim) + args.parts.eps);
    }
    for (std::int32_t i = runs.piece(lane); i < pieces; i += runs.lanes) {
      const auto pair = runs.template pair<width, Whole>(i, args.head_dim);
      pair.load(raw, low, high);
      if (bias != nullptr) pair.add(bias, low, high);
      if (has_norm) {
        Values<A, width> low_weight, high_weight;
        pair.load(args.parts.norm_weight, low_weight, high_weight);
        for (int e = 0; e < width; ++e) {
          low.at[e] = low_weight.at[e] * (low.at[e] * inverse);
          high.at[e] = high_weight.at[e] * (high.at[e] * inverse);
        }
      }
      if (args.parts.positions != nullptr) {
        Rope<A, width> rope;
        rope.read(args.parts, args.parts.positions[token], runs.half, pair.lower);
        rope.turn(low, high);
      }
      pair.store(args.out + row * args.head_dim, low, high);
    }
  }
};

template <class T, HeadForwardForm Form, bool Whole>
__global__ void __launch_bounds__(head_forward_warps* cuda::warp_lanes, Form == HeadForwardForm::norm ? 4 : 5)
    head_forward_groups(const __grid_constant__ HeadForwardGroups<T> args) {
  const std::uint32_t tile = blockIdx.x / args.tile_blocks, in_tile = blockIdx.x % args.tile_blocks;
  int index = 0;
#pragma unroll
  for (int g = 0; g + 1 < static_cast<int>(most_head_groups); ++g)
    index += in_tile >= args.end_block[g] ? 1 : 0;
  const HeadForwardGroup<T>& group = args.groups[index];
  const std::uint32_t begin = index == 0 ? 0 : args.end_block[index - 1];
  const std::uint32_t block = tile * (args.end_block[index] - begin) + in_tile - begin;
  const int lane = static_cast<int>(threadIdx.x) % cuda::warp_lanes;
  const std::uint32_t item = block * head_forward_warps + threadIdx.x / cuda::warp_lanes;
  if constexpr (Form == HeadForwardForm::long_heads) {
    LongHeadForwardWarp<T, Whole>{group, lane}(item);
  } else {
    constexpr int many = 4;
    if constexpr (Form == HeadForwardForm::norm) {
      if (group.args.parts.norm_weight != nullptr) {
        if (group.sets == 1) return HeadForwardWarp<T, 1, true, Whole>{group, lane}(item);
        return HeadForwardWarp<T, many, true, Whole>{group, lane}(item);
      }
    }
    if (group.sets == 1) return HeadForwardWarp<T, 1, false, Whole>{group, lane}(item);
    HeadForwardWarp<T, many, false, Whole>{group, lane}(item);
  }
}

/// Groups of tokens, and of the heads of one, as the kernel's forms have them.
template <class T>
HeadForwardGroup<T> share_out(const HeadForward<T>& args, HeadForwardForm form) {
  const HeadRuns runs = HeadRuns::of(args.heads, args.head_dim, lane_width<T>);
  if (form == HeadForwardForm::long_heads) return {args, runs, static_cast<std::int32_t>(args.heads), 1};
  constexpr std::int32_t many = 4;
  const std::int32_t sets = runs.sets(), shares = (sets + many - 1) / many;
  return {args, runs, shares, (sets + shares - 1) / shares};
}

/// All groups in one launch. @pre the groups have the same tokens
/// @throws ContractError for more than 2^31 heads of tokens.
template <class T>
void run_head_forward(const ExecutionSpace& space, std::span<const HeadForward<T>> groups) {
  constexpr const char* label = "layerstream::head_transform_forward";
  HeadForwardForm form = HeadForwardForm::plain;
  bool whole = true;
  std::int64_t rows = 0;
  for (const HeadForward<T>& group : groups) {
    rows += group.tokens * group.heads;
    whole = whole && whole_heads(group.head_dim, {group.row_stride}, group.parts, {group.out, group.raw});
    const bool is_long = HeadRuns::of(group.heads, group.head_dim, lane_width<T>).pieces > cuda::warp_lanes;
    if (is_long) form = HeadForwardForm::long_heads;
    if (group.parts.norm_weight != nullptr && form == HeadForwardForm::plain) form = HeadForwardForm::norm;
  }
  LAYERSTREAM_EXPECT(rows <= std::numeric_limits<std::int32_t>::max() / cuda::warp_lanes,
                     "{}: {} heads in one launch", label, rows);
  if (rows == 0) return;

  HeadForwardGroups<T> args{};
  std::int32_t tokens_at_once = 1;  // of a warp; a power of two in every group
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].heads == 0) continue;
    args.groups[g] = share_out(groups[g], form);
    if (form != HeadForwardForm::long_heads) {
      tokens_at_once = std::max(tokens_at_once, args.groups[g].runs.tokens);
    }
  }
  const std::int64_t tile_tokens = std::int64_t{head_forward_warps} * tokens_at_once;
  for (std::size_t g = 0; g < most_head_groups; ++g) {
    if (g < groups.size() && groups[g].heads > 0) {
      const HeadForwardGroup<T>& group = args.groups[g];
      const std::int32_t tokens = form == HeadForwardForm::long_heads ? 1 : group.runs.tokens;
      args.tile_blocks += static_cast<std::uint32_t>(tokens_at_once / tokens * group.shares);
    }
    args.end_block[g] = args.tile_blocks;
  }
  const std::int64_t tiles = (groups[0].tokens + tile_tokens - 1) / tile_tokens;
  const auto launch = [&](auto kernel) {
    cuda::launch_labelled(space, label,
                          {.blocks = static_cast<int>(tiles * args.tile_blocks),
                           .lanes = head_forward_warps * cuda::warp_lanes},
                          kernel, args);
  };
  const auto launch_form = [&]<HeadForwardForm Form>() {
    whole ? launch(head_forward_groups<T, Form, true>) : launch(head_forward_groups<T, Form, false>);
  };
  switch (form) {
    case HeadForwardForm::plain:
      return launch_form.template operator()<HeadForwardForm::plain>();
    case HeadForwardForm::norm:
      return launch_form.template operator()<HeadForwardForm::norm>();
    case HeadForwardForm::long_heads:
      return launch_form.template operator()<HeadForwardForm::long_heads>();
  }
}

#endif

}  // namespace layerstream::ops::detail
