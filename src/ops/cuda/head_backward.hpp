#pragma once

#include <cstdint>

#include "ops/cuda/head_pieces.hpp"

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

#if defined(__CUDACC__)

/// One warp for one set of heads of every so many-th token. D is the dtype of dout, K: pieces of a half that
/// one lane can have. The next token's numbers, and its rope's angles, are under way while a token's are
/// worked on.
template <class T, class D, int K, bool Norm, bool Bias, bool Whole>
struct HeadBackwardWarp {
  using A = MathOf<T>;
  static constexpr int width = lane_width<D>;
  using Numbers = Values<A, width>;
  using Share = HeadShare<A, width, K>;
  using Sums = HeadShare<A, lane_width<T>, K>;  ///< of which a lane uses `width` elements of each piece
  const HeadBackwardGroup<T>& group;
  int lane;  ///< of the warp

  /// Where a lane works: on which of a half's pieces first, and on which element of a token that begins.
  struct Place {
    std::uint32_t piece, first;
  };
  /// More than there are, also when a lane's step is added as often as it has tokens.
  static constexpr std::uint32_t no_token = std::uint32_t{1} << 31;

  /// A lane's share of one token, as it lies in memory.
  struct Held {
    HeldHead<D, width, Whole> dout[K];
    HeldHead<T, width, Whole> raw[Norm ? K : 1];
  };

  /// @param set of the group's heads; a set that the group does not have is one of no heads
  /// @param slot of `slots` that share out the tokens
  /// @param bias_sums, norm_sums to add a lane's sums to, in order of tokens; norm_sums only with a norm
  __device__ __forceinline__ void operator()(std::int32_t set, std::int32_t slot, std::int32_t slots,
                                             Sums& bias_sums, Sums& norm_sums) const {
    const HeadBackward<T>& args = group.args;
    const HeadRuns& runs = group.runs;
    const std::int32_t head = set * runs.heads + runs.head(lane), piece = runs.piece(lane);
    const Place place{static_cast<std::uint32_t>(piece),
                      static_cast<std::uint32_t>(head * args.head_dim + piece * width)};
    // Lanes without elements take part in the sums of their warp.
    const bool exists = head < runs.all_heads && piece < runs.pieces;
    const auto tokens = static_cast<std::uint32_t>(args.tokens);
    const auto step = static_cast<std::uint32_t>(slots * runs.tokens);
    auto of_warp = static_cast<std::uint32_t>(slot * runs.tokens);
    std::uint32_t token = exists ? of_warp + static_cast<std::uint32_t>(runs.token(lane)) : no_token;

    Share weight{};
    if constexpr (Norm && K == 1) {
      if (exists) load_weight(place, 0, weight);
    }
    Held held{};
    read(place, token, held);
    Rope<A, width> rope[K];  // anything for a token that is not there
    read_rope(place, token, position_of(token), rope);
    std::uint32_t position = position_of(token + step);
    for (; of_warp < tokens; of_warp += step, token += step) {
      const bool live = is_there(token);
      Share gradient;
      HeldHead<T, width, Whole> raw[Norm ? K : 1];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        gradient.low[k] = held.dout[k].low.numbers();
        gradient.high[k] = held.dout[k].high.numbers();
        if constexpr (Norm) raw[k] = held.raw[k];
      }
      read(place, token + step, held);
      if (args.parts.positions != nullptr) {
#pragma unroll
        for (int k = 0; k < K; ++k) rope[k].turn_back(gradient.low[k], gradient.high[k]);
        read_rope(place, token + step, position, rope);
        position = position_of(token + 2 * step);
      }
      if constexpr (Norm) {
        if (has_norm()) through_norm(place, live, raw, weight, gradient, norm_sums);
      }
      if (!live) continue;
      T* const draw = args.draw + at(place, token, group.draw_stride);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!has(place, k)) continue;
        pair(place, k).store(draw, gradient.low[k], gradient.high[k]);
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
  /// Of a lane that has a first piece.
  __device__ bool has(const Place& place, int k) const {
    return k == 0 || place.piece + k * group.runs.lanes < static_cast<std::uint32_t>(group.runs.pieces);
  }
  /// From the lane's first piece on.
  __device__ HeadPair<width, Whole> pair(const Place& place, int k) const {
    auto pieces =
        group.runs.template pair<width, Whole>(place.piece + k * group.runs.lanes, group.args.head_dim);
    pieces.lower.first = k * group.runs.lanes * width;
    pieces.upper.first = group.runs.half + pieces.lower.first;
    return pieces;
  }
  /// Elements before the lane's first piece of a token.
  __device__ static std::int64_t at(const Place& place, std::uint32_t token, std::uint32_t stride) {
    return static_cast<std::int64_t>(std::uint64_t{token} * stride + place.first);
  }
  __device__ bool is_there(std::uint32_t token) const {
    return token < static_cast<std::uint32_t>(group.args.tokens);
  }
  __device__ std::uint32_t position_of(std::uint32_t token) const {
    const std::int32_t* const positions = group.args.parts.positions;
    return positions != nullptr && is_there(token) ? static_cast<std::uint32_t>(positions[token]) : 0;
  }

  __device__ void read(const Place& place, std::uint32_t token, Held& held) const {
    if (!is_there(token)) return;
    const HeadBackward<T>& args = group.args;
    const D* const dout = static_cast<const D*>(args.dout) + at(place, token, group.dout_stride);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (has(place, k)) pair(place, k).read(dout, held.dout[k]);
    }
    if constexpr (Norm) {
      if (!has_norm()) return;
      const T* const raw = args.raw + at(place, token, group.raw_stride);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (has(place, k)) pair(place, k).read(raw, held.raw[k]);
      }
    }
  }
  __device__ void read_rope(const Place& place, std::uint32_t token, std::uint32_t position,
                            Rope<A, width> (&rope)[K]) const {
    const HeadParts<T>& parts = group.args.parts;
    if (parts.positions == nullptr || !is_there(token)) return;
    // In 32 bits, as ops/heads.cpp bounds the tables.
    const std::uint32_t angles = position * static_cast<std::uint32_t>(group.runs.half) + place.piece * width;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!has(place, k)) continue;
      const auto piece = pair(place, k).lower;
      rope[k] = {load_piece(piece, parts.cos + angles), load_piece(piece, parts.sin + angles)};
    }
  }
  __device__ void load_weight(const Place& place, int k, Share& weight) const {
    pair(place, k).load(group.args.parts.norm_weight + place.piece * width, weight.low[k], weight.high[k]);
  }

  /// From the gradient of what left the norm to that of what entered it, which is raw + bias. A lane that is
  /// not `live` only takes part in the sums of its warp.
  __device__ void through_norm(const Place& place, bool live,
                               const HeldHead<T, width, Whole> (&raw)[Norm ? K : 1], Share& weight,
                               Share& gradient, Sums& weight_sums) const {
    const HeadBackward<T>& args = group.args;
    A squares{}, dot{};
    if (live) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!has(place, k)) continue;
        if constexpr (K > 1) load_weight(place, k, weight);
        Numbers low = raw[k].low.numbers(), high = raw[k].high.numbers();
        add_bias(place, k, low, high);
        add_products(low, gradient.low[k], weight.low[k], squares, dot);
        add_products(high, gradient.high[k], weight.high[k], squares, dot);
      }
    }
    // As sum_in_run, both at once.
    for (int offset = group.runs.lanes / 2; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(cuda::all_lanes, squares, offset);
      dot += __shfl_xor_sync(cuda::all_lanes, dot, offset);
    }
    if (!live) return;
    const A inverse = A(1) / Kokkos::sqrt(squares * group.part + args.parts.eps);
    const A mean = dot * inverse * group.part;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!has(place, k)) continue;
      Numbers low = cuda::widen_again(raw[k].low.stored()), high = cuda::widen_again(raw[k].high.stored());
      add_bias(place, k, low, high);
      through_norm(low, weight.low[k], inverse, mean, gradient.low[k], weight_sums.low[k]);
      through_norm(high, weight.high[k], inverse, mean, gradient.high[k], weight_sums.high[k]);
    }
  }
  __device__ void add_bias(const Place& place, int k, Numbers& low, Numbers& high) const {
    if constexpr (Bias) {
      const HeadBackward<T>& args = group.args;
      if (args.parts.bias != nullptr) pair(place, k).add(args.parts.bias + place.first, low, high);
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
