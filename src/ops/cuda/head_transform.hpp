#pragma once

#include <initializer_list>
#include <limits>

#include "ops/detail/head_parts.hpp"
#include "ops/detail/launch.hpp"

/// The head transform on a CUDA device: a run of neighbouring lanes (a power of two) works on one head of one
/// token. A lane holds pieces of the lower half of the head and the pieces that rope pairs with them in the
/// upper half.
namespace layerstream::ops::detail {

/// Pieces of W elements that a lane has in one half of a head, and what is at them.
template <class T, class Piece>
struct HeadPair {
  using A = MathOf<T>;
  static constexpr int width = Piece::width;
  using Numbers = Values<A, width>;
  Piece lower, upper;

  template <class From>
  KOKKOS_INLINE_FUNCTION void load(const From* row, Numbers& low, Numbers& high) const {
    low = load_piece(lower, row);
    high = load_piece(upper, row);
  }
  template <class To>
  KOKKOS_INLINE_FUNCTION void store(To* row, const Numbers& low, const Numbers& high) const {
    store_piece(lower, row, low);
    store_piece(upper, row, high);
  }
  /// What enters the norm.
  KOKKOS_INLINE_FUNCTION void load_biased(const T* raw, const A* bias, Numbers& low, Numbers& high) const {
    load(raw, low, high);
    if (bias == nullptr) return;
    Numbers low_bias, high_bias;
    load(bias, low_bias, high_bias);
    for (int e = 0; e < width; ++e) {
      low.at[e] += low_bias.at[e];
      high.at[e] += high_bias.at[e];
    }
  }
  /// Rotation by the angles of one position (Forward) or by the opposite ones.
  template <bool Forward>
  KOKKOS_INLINE_FUNCTION void rotate(const HeadParts<T>& parts, std::int64_t token, std::int64_t half,
                                     Numbers& low, Numbers& high) const {
    if (parts.positions == nullptr) return;
    const std::int64_t row = parts.positions[token] * half;
    const Numbers cos = load_piece(lower, parts.cos + row), sin = load_piece(lower, parts.sin + row);
    for (int e = 0; e < width; ++e) {
      const A a = low.at[e], b = high.at[e];
      const A sine = Forward ? sin.at[e] : -sin.at[e];
      low.at[e] = a * cos.at[e] - b * sine;
      high.at[e] = b * cos.at[e] + a * sine;
    }
  }
};

/// How the halves of a head fall to the lanes of a run.
struct HeadRuns {
  std::int64_t half;  ///< elements of the lower half; the upper one may have one less
  int pieces;         ///< of a half
  int lanes;          ///< of a run

  static HeadRuns of(std::int64_t head_dim, int width) {
    HeadRuns runs{(head_dim + 1) / 2, 0, 1};
    runs.pieces = static_cast<int>((runs.half + width - 1) / width);
    while (runs.lanes < runs.pieces && runs.lanes < cuda::warp_lanes) runs.lanes *= 2;
    return runs;
  }

  template <class T, int W, bool Whole>
  KOKKOS_INLINE_FUNCTION HeadPair<T, Piece<W, Whole>> pair(int index, std::int64_t head_dim) const {
    const std::int64_t low = static_cast<std::int64_t>(index) * W, high = half + low;
    return {{low, half - low}, {high, head_dim - high}};
  }
};

template <class T>
struct HeadForwardTeam {
  using A = MathOf<T>;
  static constexpr int most_lanes = 256;
  static constexpr int width = lane_width<T>;
  HeadForward<T> args;
  HeadRuns runs;

  template <bool Whole>
  KOKKOS_FUNCTION void operator()(const cuda::Team<Whole>& team, std::int64_t index) const {
    const int own = team.lane % runs.lanes;
    const std::int64_t row = index * (team.lanes / runs.lanes) + team.lane / runs.lanes;
    // Idle runs take part in the sums of their warp.
    const int pieces = row < args.tokens * args.heads ? runs.pieces : 0;
    const auto row_index = static_cast<std::uint32_t>(row), heads = static_cast<std::uint32_t>(args.heads);
    const std::int64_t token = row_index / heads, head = row_index % heads;
    const T* raw = args.raw + token * args.row_stride + head * args.head_dim;
    const A* bias = args.parts.bias == nullptr ? nullptr : args.parts.bias + head * args.head_dim;
    T* out = args.out + row * args.head_dim;
    const bool has_norm = args.parts.norm_weight != nullptr;
    Values<A, width> low, high;
    A inverse(1);
    if (has_norm) {
      A squares{};
      for (int i = own; i < pieces; i += runs.lanes) {
        runs.template pair<T, width, Whole>(i, args.head_dim).load_biased(raw, bias, low, high);
        for (int e = 0; e < width; ++e) squares += low.at[e] * low.at[e] + high.at[e] * high.at[e];
      }
      squares = cuda::sum_in_run(squares, runs.lanes);
      inverse = A(1) / Kokkos::sqrt(squares / static_cast<A>(args.head_dim) + args.parts.eps);
    }
    for (int i = own; i < pieces; i += runs.lanes) {
      const auto pair = runs.template pair<T, width, Whole>(i, args.head_dim);
      pair.load_biased(raw, bias, low, high);
      if (has_norm) {
        Values<A, width> low_weight, high_weight;
        pair.load(args.parts.norm_weight, low_weight, high_weight);
        for (int e = 0; e < width; ++e) {
          low.at[e] = low_weight.at[e] * (low.at[e] * inverse);
          high.at[e] = high_weight.at[e] * (high.at[e] * inverse);
        }
      }
      pair.template rotate<true>(args.parts, token, runs.half, low, high);
      pair.store(out, low, high);
    }
  }
};

/// One team for one head over a block of tokens: its runs take the tokens in turn, and their sums are added
/// at the end, within a warp as a tree, then the warps in order. K: pieces of a half that one lane can hold.
template <class T, class D, int K, bool HasNorm>
struct HeadBackwardTeam {
  using A = MathOf<T>;
  static constexpr int most_lanes = 128;
  static constexpr int resident_lanes = HasNorm ? 512 : 768;
  static constexpr int width = lane_width<T>;
  static constexpr int most_columns = 2 * K * cuda::warp_lanes * width;
  HeadBackward<T, D> args;
  HeadRuns runs;

  /// One number for every element of the head that a lane has.
  struct Share {
    Values<A, width> low[K], high[K];
  };

  template <bool Whole>
  KOKKOS_FUNCTION void operator()(const cuda::Team<Whole>& team, std::int64_t row) const {
    const std::int64_t block = row / args.heads, head = row % args.heads;
    const std::int64_t begin = block * args.tokens_per_block;
    const std::int64_t end =
        begin + args.tokens_per_block < args.tokens ? begin + args.tokens_per_block : args.tokens;
    const int step = team.lanes / runs.lanes;
    Share bias_sums{}, norm_sums{};
    for (std::int64_t first = begin; first < end; first += step) {
      backward_token<Whole>(team, first + team.lane / runs.lanes, end, head, bias_sums, norm_sums);
    }
    if (args.bias_partials != nullptr) {
      write_sums<Whole>(team, bias_sums, args.bias_partials + row * args.head_dim);
    }
    if constexpr (HasNorm) write_sums<Whole>(team, norm_sums, args.norm_partials + row * args.head_dim);
  }

 private:
  /// A token from `end` on has no elements, but its lanes take part in the sums of their warp.
  template <bool Whole>
  KOKKOS_INLINE_FUNCTION void backward_token(const cuda::Team<Whole>& team, std::int64_t token,
                                             std::int64_t end, std::int64_t head, Share& bias_sums,
                                             Share& norm_sums) const {
    const int own = team.lane % runs.lanes, pieces = token < end ? runs.pieces : 0;
    const D* dout = args.dout + (token * args.heads + head) * args.head_dim;
    T* draw = args.draw + token * args.draw_stride + head * args.head_dim;
    Share gradient, value;
    [[maybe_unused]] A inverse{}, mean{};
    LAYERSTREAM_UNROLL
    for (int k = 0; k < K; ++k) {
      const int index = own + k * runs.lanes;
      if (index >= pieces) continue;
      const auto pair = runs.template pair<T, width, Whole>(index, args.head_dim);
      pair.load(dout, gradient.low[k], gradient.high[k]);
      pair.template rotate<false>(args.parts, token, runs.half, gradient.low[k], gradient.high[k]);
    }
    if constexpr (HasNorm) {
      const T* raw = args.raw + token * args.raw_stride + head * args.head_dim;
      const A* bias = args.parts.bias == nullptr ? nullptr : args.parts.bias + head * args.head_dim;
      A squares{}, dot{};
      LAYERSTREAM_UNROLL
      for (int k = 0; k < K; ++k) {
        const int index = own + k * runs.lanes;
        if (index >= pieces) continue;
        const auto pair = runs.template pair<T, width, Whole>(index, args.head_dim);
        pair.load_biased(raw, bias, value.low[k], value.high[k]);
        Values<A, width> low_weight, high_weight;
        pair.load(args.parts.norm_weight, low_weight, high_weight);
        for (int e = 0; e < width; ++e) {
          const A low = value.low[k].at[e], high = value.high[k].at[e];
          squares += low * low + high * high;
          dot += gradient.low[k].at[e] * low_weight.at[e] * low +
                 gradient.high[k].at[e] * high_weight.at[e] * high;
        }
      }
      squares = cuda::sum_in_run(squares, runs.lanes);
      dot = cuda::sum_in_run(dot, runs.lanes);
      inverse = A(1) / Kokkos::sqrt(squares / static_cast<A>(args.head_dim) + args.parts.eps);
      mean = dot * inverse / static_cast<A>(args.head_dim);
    }
    LAYERSTREAM_UNROLL
    for (int k = 0; k < K; ++k) {
      const int index = own + k * runs.lanes;
      if (index >= pieces) continue;
      const auto pair = runs.template pair<T, width, Whole>(index, args.head_dim);
      if constexpr (HasNorm) {
        Values<A, width> low_weight, high_weight;
        pair.load(args.parts.norm_weight, low_weight, high_weight);
        through_norm(gradient.low[k], value.low[k], low_weight, inverse, mean, norm_sums.low[k]);
        through_norm(gradient.high[k], value.high[k], high_weight, inverse, mean, norm_sums.high[k]);
      }
      pair.store(draw, gradient.low[k], gradient.high[k]);
      for (int e = 0; e < width; ++e) {
        bias_sums.low[k].at[e] += gradient.low[k].at[e];
        bias_sums.high[k].at[e] += gradient.high[k].at[e];
      }
    }
  }

  KOKKOS_INLINE_FUNCTION static void through_norm(Values<A, width>& gradient, const Values<A, width>& value,
                                                  const Values<A, width>& weight, A inverse, A mean,
                                                  Values<A, width>& weight_sums) {
    for (int e = 0; e < width; ++e) {
      const A normalised = value.at[e] * inverse;
      weight_sums.at[e] += gradient.at[e] * normalised;
      gradient.at[e] = inverse * (gradient.at[e] * weight.at[e] - normalised * mean);
    }
  }

  /// partials[i] = the sum for element i of the head over all runs of the team.
  template <bool Whole>
  KOKKOS_INLINE_FUNCTION void write_sums(const cuda::Team<Whole>& team, const Share& sums,
                                         A* partials) const {
#if defined(__CUDA_ARCH__)
    __shared__ A of_warp[most_lanes / cuda::warp_lanes][most_columns];
    const int own = team.lane % runs.lanes;
    const bool writes = team.lane % cuda::warp_lanes < runs.lanes;
    LAYERSTREAM_UNROLL
    for (int k = 0; k < K; ++k) {
      const int index = own + k * runs.lanes;
      const auto pair = runs.template pair<T, width, Whole>(index, args.head_dim);
      for (int e = 0; e < width; ++e) {
        const A low = cuda::sum_across_warp(sums.low[k].at[e], runs.lanes);
        const A high = cuda::sum_across_warp(sums.high[k].at[e], runs.lanes);
        if (!writes || index >= runs.pieces) continue;
        if (pair.lower.has(e)) of_warp[team.warp()][pair.lower.first + e] = low;
        if (pair.upper.has(e)) of_warp[team.warp()][pair.upper.first + e] = high;
      }
    }
    __syncthreads();
    for (int column = team.lane; column < args.head_dim; column += team.lanes) {
      A total{};
      for (int warp = 0; warp < team.warps(); ++warp) total += of_warp[warp][column];
      partials[column] = total;
    }
    __syncthreads();
#else
    (void)team, (void)sums, (void)partials;
#endif
  }
};

template <class T>
bool whole_heads(std::int64_t head_dim, std::initializer_list<std::int64_t> strides,
                 const HeadParts<T>& parts, std::initializer_list<const void*> pointers) {
  constexpr int width = lane_width<T>;
  return head_dim % (2 * width) == 0 && whole_pieces(width, strides, pointers) &&
         whole_pieces(width, {}, {parts.bias, parts.norm_weight, parts.cos, parts.sin});
}

template <class T>
void run_head_forward(const ExecutionSpace& space, const char* label, const HeadForward<T>& args) {
  using Body = HeadForwardTeam<T>;
  const HeadRuns runs = HeadRuns::of(args.head_dim, Body::width);
  const std::int64_t rows = args.tokens * args.heads, per_team = Body::most_lanes / runs.lanes;
  LAYERSTREAM_EXPECT(rows <= std::numeric_limits<std::int32_t>::max(), "{}: {} heads in one launch", label,
                     rows);
  for_each_row(space, label, (rows + per_team - 1) / per_team, Body{args, runs},
               {.whole = whole_heads(args.head_dim, {args.row_stride}, args.parts, {args.out, args.raw}),
                .lanes = Body::most_lanes});
}

template <class Body, class T, class D>
void launch_head_backward(const ExecutionSpace& space, const char* label, const HeadBackward<T, D>& args,
                          const HeadRuns& runs) {
  const std::int64_t raw_stride = args.raw == nullptr ? 0 : args.raw_stride;
  for_each_row(space, label, args.blocks * args.heads, Body{args, runs},
               {.whole = whole_heads(args.head_dim, {args.draw_stride, raw_stride}, args.parts,
                                     {args.draw, args.dout, args.raw}),
                .lanes = Body::most_lanes});
}

/// @throws ContractError for heads longer than 256 pieces of 16 bytes.
template <class T, class D>
void run_head_backward(const ExecutionSpace& space, const char* label, const HeadBackward<T, D>& args) {
  constexpr int width = lane_width<T>, more = 4;
  const HeadRuns runs = HeadRuns::of(args.head_dim, width);
  LAYERSTREAM_EXPECT(runs.pieces <= more * cuda::warp_lanes,
                     "{}: heads of {} elements; at most {} fit the kernel", label, args.head_dim,
                     2 * more * cuda::warp_lanes * width);
  const bool one = runs.pieces <= cuda::warp_lanes, norm = args.norm_partials != nullptr;
  if (one && !norm) return launch_head_backward<HeadBackwardTeam<T, D, 1, false>>(space, label, args, runs);
  if (one) return launch_head_backward<HeadBackwardTeam<T, D, 1, true>>(space, label, args, runs);
  if (!norm) return launch_head_backward<HeadBackwardTeam<T, D, more, false>>(space, label, args, runs);
  launch_head_backward<HeadBackwardTeam<T, D, more, true>>(space, label, args, runs);
}

}  // namespace layerstream::ops::detail
