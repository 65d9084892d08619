#pragma once

#include <cstdint>

#include "ops/cuda/head_walk.hpp"

/// The head transform's backward direction on a CUDA device: what one warp does. See
/// head_backward_launch.hpp for how warps share out the work.
namespace layerstream::ops::detail {

/// A group of heads in a launch for several.
template <class T>
struct HeadBackwardGroup {
  HeadBackward<T> args;
  HeadRuns runs;
  MathOf<T> part;                                      ///< 1 / d
  std::uint32_t dout_stride, raw_stride, draw_stride;  ///< elements between tokens
  MathOf<T>* bias_partials;                            // (blocks, H, d); nullptr without a bias
  MathOf<T>* norm_partials;                            // (blocks, sets, d); nullptr without a norm

  /// Not even values are: their gradients are FP32.
  bool is_light() const { return false; }
};

/// Elements of a lane's piece: 16 bytes of dout, so that every warp has as much of it under way.
template <class T>
int head_backward_width(const HeadBackward<T>& args) {
  return args.has_wide_dout ? lane_width<MathOf<T>> : lane_width<T>;
}

/// One number for every element of a head that a lane has: K pieces of W elements of either half.
template <class A, int W, int K>
struct HeadShare {
  Values<A, W> low[K], high[K];
};

/// What a lane reads of a token: pieces of either half of dout and, with a norm, of raw; and a position.
template <int K, bool Norm, int Lanes>
using HeadBackwardRing =
    cuda::LaneRing<(Norm ? 4 : 2) * K, K == 1 ? (Norm ? 2 : 3) : 1, Lanes, Norm && K == 1>;

#if defined(__CUDACC__)

/// One warp for one set of heads of every so many-th token. D is the dtype of dout, K: pieces of a half that
/// one lane can have, Lanes: of a team, at most.
template <class T, class D, int K, int Lanes, bool Norm, bool Bias, bool Whole>
struct HeadBackwardWarp {
  using A = MathOf<T>;
  static constexpr int width = lane_width<D>;
  using Numbers = Values<A, width>;
  using Share = HeadShare<A, width, K>;
  using Sums = HeadShare<A, lane_width<T>, K>;  ///< of which a lane uses `width` elements of each piece
  static constexpr int first_raw = 2 * K;       ///< among the ring's words
  using Ring = HeadBackwardRing<K, Norm, Lanes>;
  using Walk = HeadWalk<HeadBackwardGroup<T>, A, width, K, Norm && K == 1, Whole>;
  using Raw = HeldHead<T, width, Whole>[Norm ? K : 1];
  const HeadBackwardGroup<T>& group;

  /// @param bias_sums, norm_sums to add a lane's sums to, in order of tokens; norm_sums only with a norm
  __device__ __forceinline__ void operator()(Walk walk, Ring ring, Sums& bias_sums, Sums& norm_sums) const {
    const HeadBackward<T>& args = group.args;
    const HeadRows<const D> dout = walk.rows(static_cast<const D*>(args.dout), group.dout_stride);
    const HeadRows<const T> raw_rows = walk.rows(args.raw, group.raw_stride);
    const HeadRows<T> draw = walk.rows(args.draw, group.draw_stride);
    const auto ask = [&](int ahead) {
      const std::uint32_t token = walk.token(ahead);
      if (walk.is_there(token)) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (!walk.has(k)) continue;
          ask_for(walk.pair(k), 2 * k, dout.at(token), ring);
          if constexpr (Norm) {
            if (has_norm()) ask_for(walk.pair(k), first_raw + 2 * k, raw_rows.at(token), ring);
          }
        }
      }
      walk.end_round(ahead, ring);
    };
    for (int round = 0; round < Ring::depth; ++round) ask(round);
    walk.ask_for_rope();
    [[maybe_unused]] const A* norm_weight = nullptr;
    if constexpr (Norm) {
      if (has_norm()) norm_weight = held_argument(args.parts.norm_weight) + walk.in_head();
    }
    for (; walk.goes_on(); walk.advance()) {
      const bool live = walk.is_there(walk.token());
      ring.wait();
      Share gradient;
      Raw raw;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        gradient.low[k] = ring.template take<D, width, Whole>(2 * k).numbers();
        gradient.high[k] = ring.template take<D, width, Whole>(2 * k + 1).numbers();
        if constexpr (Norm) {
          raw[k].low = ring.template take<T, width, Whole>(first_raw + 2 * k);
          raw[k].high = ring.template take<T, width, Whole>(first_raw + 2 * k + 1);
        }
      }
      std::int32_t position = 0;
      if constexpr (Walk::wants_positions) position = ring.number();
      ask(Ring::depth);
      walk.template turn<true>(position, gradient.low, gradient.high);
      if constexpr (Norm) {
        if (has_norm()) through_norm(walk, live, raw, norm_weight, gradient, norm_sums);
      }
      if (!live) continue;
      T* const out = draw.at(walk.token());
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!walk.has(k)) continue;
        walk.pair(k).store(out, gradient.low[k], gradient.high[k]);
        if constexpr (Bias) {
          for (int e = 0; e < width; ++e) {
            bias_sums.low[k].at[e] += gradient.low[k].at[e];
            bias_sums.high[k].at[e] += gradient.high[k].at[e];
          }
        }
      }
    }
  }

 private:
  /// Heads of many pieces have one body for every combination of parts.
  __device__ bool has_norm() const {
    return Norm && (K == 1 || group.args.parts.norm_weight != nullptr);
  }

  template <class V>
  __device__ static void ask_for(const HeadPair<width, Whole>& pair, int word, const V* row, Ring& ring) {
    ring.ask(word, pair.lower, row);
    ring.ask(word + 1, pair.upper, row);
  }
  /// From the gradient of what left the norm to that of what entered it, which is raw + bias. A lane that is
  /// not `live` only takes part in the sums of its warp.
  __device__ void through_norm(const Walk& walk, bool live, const Raw& raw, const A* norm_weight,
                               Share& gradient, Sums& weight_sums) const {
    const HeadBackward<T>& args = group.args;
    Share weight;  // read here, as registers are few
    A squares{}, dot{};
    if (live) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!walk.has(k)) continue;
        walk.pair(k).load(norm_weight, weight.low[k], weight.high[k]);
        Numbers low = raw[k].low.numbers(), high = raw[k].high.numbers();
        add_bias(walk, k, low, high);
        add_products(low, gradient.low[k], weight.low[k], squares, dot);
        add_products(high, gradient.high[k], weight.high[k], squares, dot);
      }
    }
    // As sum_in_run, both at once.
    for (int offset = walk.lanes() / 2; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(cuda::all_lanes, squares, offset);
      dot += __shfl_xor_sync(cuda::all_lanes, dot, offset);
    }
    if (!live) return;
    const A inverse = A(1) / Kokkos::sqrt(squares * group.part + args.parts.eps);
    const A mean = dot * inverse * group.part;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!walk.has(k)) continue;
      Numbers low = cuda::widen_again(raw[k].low.stored()), high = cuda::widen_again(raw[k].high.stored());
      add_bias(walk, k, low, high);
      through_norm(low, weight.low[k], inverse, mean, gradient.low[k], weight_sums.low[k]);
      through_norm(high, weight.high[k], inverse, mean, gradient.high[k], weight_sums.high[k]);
    }
  }
  __device__ void add_bias(const Walk& walk, int k, Numbers& low, Numbers& high) const {
    if constexpr (Bias) {
      const HeadBackward<T>& args = group.args;
      if (args.parts.bias != nullptr) walk.pair(k).add(args.parts.bias + walk.in_heads(), low, high);
    }
  }
  __device__ static void add_products(const Numbers& value, const Numbers& gradient, const Numbers& weight,
                                      A& squares, A& dot) {
    for (int e = 0; e < width; ++e) {
      squares = Kokkos::fma(value.at[e], value.at[e], squares);
      dot = Kokkos::fma(gradient.at[e] * weight.at[e], value.at[e], dot);
    }
  }
  __device__ static void through_norm(const Numbers& value, const Numbers& weight, A inverse, A mean,
                                      Numbers& gradient, Values<A, lane_width<T>>& weight_sums) {
    for (int e = 0; e < width; ++e) {
      const A normalised = value.at[e] * inverse;
      weight_sums.at[e] = Kokkos::fma(gradient.at[e], normalised, weight_sums.at[e]);
      gradient.at[e] = inverse * Kokkos::fma(gradient.at[e], weight.at[e], -(normalised * mean));
    }
  }
};

#endif

}  // namespace layerstream::ops::detail
