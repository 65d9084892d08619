#pragma once

#include "ops/cuda/head_pieces.hpp"
#include "ops/detail/partials.hpp"

/// The head transform's backward direction on a CUDA device.
namespace layerstream::ops::detail {

/// K: pieces of a half that one lane can hold. The next token's numbers are under way while a token's are
/// worked on. Within a lane the sums are in order of tokens, then they are added over the tokens (for the
/// norm's weight also the heads) of a warp as a tree, then over warps in order.
template <class T, class D, int K, bool Norm, bool Bias>
struct HeadBackwardTeam {
  using A = MathOf<T>;
  static constexpr int most_lanes = (K > 1 ? 8 : Norm ? 16 : 24) * cuda::warp_lanes;
  static constexpr int resident_lanes = most_lanes;
  static constexpr int width = lane_width<T>;
  using Numbers = Values<A, width>;
  HeadBackward<T, D> args;
  HeadRuns runs;
  HeadTeams teams;

  /// One number for every element of a head that a lane has.
  struct Share {
    Numbers low[K], high[K];
  };
  /// A lane's share of one token, as read.
  template <bool Whole>
  struct Held {
    HeldHead<D, width, Whole> dout[K];
    HeldHead<T, width, Whole> raw[Norm ? K : 1];
  };
  /// Where a lane works.
  struct Place {
    std::int32_t own, head;
  };

  template <bool Whole>
  KOKKOS_FUNCTION void operator()(const cuda::Team<Whole>& team, std::int64_t index) const {
    const auto block = static_cast<std::int32_t>(index) / teams.splits;
    const std::int32_t split = static_cast<std::int32_t>(index) % teams.splits;
    const std::int32_t slot = team.warp() / teams.groups;
    const std::int32_t group = split * teams.groups + team.warp() % teams.groups;
    const Place place{runs.piece(team.lane), group * runs.heads + runs.head(team.lane)};
    // Lanes without elements take part in the sums of their warp.
    const bool exists = place.head < runs.all_heads && place.own < runs.pieces;
    const auto all_tokens = static_cast<std::int32_t>(args.tokens), tokens = exists ? all_tokens : 0;
    const std::int32_t step = teams.blocks * teams.slots * runs.tokens;
    std::int32_t of_warp = (block * teams.slots + slot) * runs.tokens;
    std::int32_t token = of_warp + runs.token(team.lane);

    Share bias_sums{}, norm_sums{};
    Held<Whole> held{};
    Rope<A, width> rope[K] = {};
    std::int32_t position = position_of(token, tokens);
    read(place, token, tokens, held);
    read_rope<Whole>(place, token < tokens, position, rope);
    position = position_of(token + step, tokens);
    for (; of_warp < all_tokens; of_warp += step, token += step) {
      Share gradient, value;
      LAYERSTREAM_UNROLL
      for (int k = 0; k < K; ++k) {
        gradient.low[k] = held.dout[k].low.numbers();
        gradient.high[k] = held.dout[k].high.numbers();
        if constexpr (Norm) {
          value.low[k] = held.raw[k].low.numbers();
          value.high[k] = held.raw[k].high.numbers();
        }
      }
      read(place, token + step, tokens, held);
      if (args.parts.positions != nullptr) {
        LAYERSTREAM_UNROLL
        for (int k = 0; k < K; ++k) rope[k].turn_back(gradient.low[k], gradient.high[k]);
        read_rope<Whole>(place, token + step < tokens, position, rope);
        position = position_of(token + 2 * step, tokens);
      }
      if constexpr (Norm) {
        if (has_norm()) through_norm<Whole>(place, token < tokens, value, gradient, norm_sums);
      }
      if (token >= tokens) continue;
      T* const draw =
          args.draw + static_cast<std::int64_t>(token) * args.draw_stride + place.head * args.head_dim;
      LAYERSTREAM_UNROLL
      for (int k = 0; k < K; ++k) {
        if (!has(place, k)) continue;
        pair<Whole>(place, k).store(draw, gradient.low[k], gradient.high[k]);
        if constexpr (Bias) {
          for (int e = 0; e < width; ++e) {
            bias_sums.low[k].at[e] += gradient.low[k].at[e];
            bias_sums.high[k].at[e] += gradient.high[k].at[e];
          }
        }
      }
    }
    if constexpr (Bias) {
      if (args.bias_partials != nullptr) {
        write_bias_sums(team, place, exists && runs.token(team.lane) == 0 && slot == 0, bias_sums,
                        args.bias_partials +
                            (static_cast<std::int64_t>(block) * args.heads + place.head) * args.head_dim);
      }
    }
    if constexpr (Norm) {
      if (has_norm()) write_norm_sums(team, norm_sums, args.norm_partials + index * args.head_dim);
    }
  }

 private:
  /// Heads of many pieces have one body for every combination of parts.
  KOKKOS_FORCEINLINE_FUNCTION bool has_norm() const {
    return Norm && (K == 1 || args.parts.norm_weight != nullptr);
  }
  /// Of a lane that has a first piece.
  KOKKOS_FORCEINLINE_FUNCTION bool has(const Place& place, int k) const {
    return k == 0 || place.own + k * runs.lanes < runs.pieces;
  }
  template <bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION HeadPair<width, Whole> pair(const Place& place, int k) const {
    return runs.template pair<width, Whole>(place.own + k * runs.lanes, args.head_dim);
  }
  KOKKOS_FORCEINLINE_FUNCTION std::int32_t position_of(std::int32_t token, std::int32_t tokens) const {
    return args.parts.positions != nullptr && token < tokens ? args.parts.positions[token] : 0;
  }

  template <bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION void read(const Place& place, std::int32_t token, std::int32_t tokens,
                                        Held<Whole>& held) const {
    if (token >= tokens) return;
    const std::int64_t row = token;
    const D* const dout = args.dout + (row * args.heads + place.head) * args.head_dim;
    LAYERSTREAM_UNROLL
    for (int k = 0; k < K; ++k) {
      if (has(place, k)) pair<Whole>(place, k).read(dout, held.dout[k]);
    }
    if constexpr (Norm) {
      if (!has_norm()) return;
      const T* const raw = args.raw + row * args.raw_stride + place.head * args.head_dim;
      LAYERSTREAM_UNROLL
      for (int k = 0; k < K; ++k) {
        if (has(place, k)) pair<Whole>(place, k).read(raw, held.raw[k]);
      }
    }
  }

  template <bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION void read_rope(const Place& place, bool live, std::int32_t position,
                                             Rope<A, width> (&rope)[K]) const {
    if (args.parts.positions == nullptr || !live) return;
    LAYERSTREAM_UNROLL
    for (int k = 0; k < K; ++k) {
      if (has(place, k)) rope[k].read(args.parts, position, runs.half, pair<Whole>(place, k).lower);
    }
  }

  /// From the gradient of what left the norm to that of what entered it; `value` is raw. A lane that is not
  /// `live` only takes part in the sums of its warp.
  template <bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION void through_norm(const Place& place, bool live, Share& value, Share& gradient,
                                                Share& weight_sums) const {
    A squares{}, dot{};
    Share weight;
    if (live) {
      LAYERSTREAM_UNROLL
      for (int k = 0; k < K; ++k) {
        if (!has(place, k)) continue;
        const auto at = pair<Whole>(place, k);
        if constexpr (Bias) {
          if (args.parts.bias != nullptr) {
            at.add(args.parts.bias + place.head * args.head_dim, value.low[k], value.high[k]);
          }
        }
        at.load(args.parts.norm_weight, weight.low[k], weight.high[k]);
        add_products(value.low[k], gradient.low[k], weight.low[k], squares, dot);
        add_products(value.high[k], gradient.high[k], weight.high[k], squares, dot);
      }
    }
    squares = cuda::sum_in_run(squares, runs.lanes);
    dot = cuda::sum_in_run(dot, runs.lanes);
    if (!live) return;
    const A inverse = A(1) / Kokkos::sqrt(squares / static_cast<A>(args.head_dim) + args.parts.eps);
    const A mean = dot * inverse / static_cast<A>(args.head_dim);
    LAYERSTREAM_UNROLL
    for (int k = 0; k < K; ++k) {
      if (!has(place, k)) continue;
      through_norm(value.low[k], weight.low[k], inverse, mean, gradient.low[k], weight_sums.low[k]);
      through_norm(value.high[k], weight.high[k], inverse, mean, gradient.high[k], weight_sums.high[k]);
    }
  }
  KOKKOS_FORCEINLINE_FUNCTION static void add_products(const Numbers& value, const Numbers& gradient,
                                                       const Numbers& weight, A& squares, A& dot) {
    for (int e = 0; e < width; ++e) {
      squares = Kokkos::fma(value.at[e], value.at[e], squares);
      dot = Kokkos::fma(gradient.at[e] * weight.at[e], value.at[e], dot);
    }
  }
  KOKKOS_FORCEINLINE_FUNCTION static void through_norm(const Numbers& value, const Numbers& weight, A inverse,
                                                       A mean, Numbers& gradient, Numbers& weight_sums) {
    for (int e = 0; e < width; ++e) {
      const A normalised = value.at[e] * inverse;
      weight_sums.at[e] = Kokkos::fma(gradient.at[e], normalised, weight_sums.at[e]);
      gradient.at[e] = inverse * Kokkos::fma(gradient.at[e], weight.at[e], -(normalised * mean));
    }
  }

#if defined(__CUDA_ARCH__)
  using LaneNumbers = A[width][most_lanes];
  /// What lanes hand to each other, one number of each at a time side by side.
  KOKKOS_FORCEINLINE_FUNCTION static LaneNumbers& of_lane() {
    __shared__ LaneNumbers numbers;
    return numbers;
  }
#endif

  /// To partials (d) the sums of all warps with these heads, by the lanes that have `writes`.
  template <bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION void write_bias_sums([[maybe_unused]] const cuda::Team<Whole>& team,
                                                   [[maybe_unused]] const Place& place,
                                                   [[maybe_unused]] bool writes,
                                                   [[maybe_unused]] const Share& sums,
                                                   [[maybe_unused]] A* partials) const {
#if defined(__CUDA_ARCH__)
    LAYERSTREAM_UNROLL
    for (int k = 0; k < K; ++k) {
      const auto at = pair<Whole>(place, k);
      const bool stores = writes && has(place, k);
      const Numbers low = sum_of_slots(team, sums.low[k]), high = sum_of_slots(team, sums.high[k]);
      if (stores) at.store(partials, low, high);
    }
#endif
  }

  /// To partials (d) the sums of all runs.
  template <bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION void write_norm_sums([[maybe_unused]] const cuda::Team<Whole>& team,
                                                   [[maybe_unused]] const Share& sums,
                                                   [[maybe_unused]] A* partials) const {
#if defined(__CUDA_ARCH__)
    LAYERSTREAM_UNROLL
    for (int k = 0; k < K; ++k) {
      write_norm_half(team, sums.low[k], k * runs.lanes, runs.half, partials);
      write_norm_half(team, sums.high[k], k * runs.lanes, args.head_dim - runs.half, partials + runs.half);
    }
#endif
  }

#if defined(__CUDA_ARCH__)
  /// Right on the lanes of slot 0.
  template <bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION Numbers sum_of_slots(const cuda::Team<Whole>& team, Numbers sums) const {
    LaneNumbers& numbers = of_lane();
    for (int e = 0; e < width; ++e) sums.at[e] = cuda::sum_across_warp(sums.at[e], runs.lanes * runs.heads);
    if (teams.slots == 1) return sums;
    const int lanes = teams.groups * cuda::warp_lanes;
    for (int e = 0; e < width; ++e) numbers[e][team.lane] = sums.at[e];
    cuda::barrier();
    if (team.lane < lanes) {
      for (int other = team.lane + lanes; other < team.lanes; other += lanes) {
        for (int e = 0; e < width; ++e) sums.at[e] += numbers[e][other];
      }
    }
    cuda::barrier();
    return sums;
  }

  /// `sums` of the pieces from first_piece on of a half of `count` elements.
  template <bool Whole>
  KOKKOS_FORCEINLINE_FUNCTION void write_norm_half(const cuda::Team<Whole>& team, const Numbers& sums,
                                                   int first_piece, std::int64_t count, A* partials) const {
    LaneNumbers& numbers = of_lane();
    for (int e = 0; e < width; ++e) {
      numbers[e][team.lane] = cuda::sum_across_warp(sums.at[e], runs.lanes);
    }
    cuda::barrier();
    for (int i = team.lane; i < width * runs.lanes; i += team.lanes) {
      const int e = i / runs.lanes, own = i % runs.lanes;
      const std::int64_t element = static_cast<std::int64_t>(first_piece + own) * width + e;
      A total{};
#pragma unroll 4
      for (int other = own; other < team.lanes; other += cuda::warp_lanes) total += numbers[e][other];
      if (element < count) partials[element] = total;
    }
    cuda::barrier();
  }
#endif
};

template <class T, class D, int K, bool Norm, bool Bias>
void launch_head_backward(const ExecutionSpace& space, const HeadBackward<T, D>& args, const HeadRuns& runs) {
  using Body = HeadBackwardTeam<T, D, K, Norm, Bias>;
  const HeadTeams teams = HeadTeams::of(args.tokens, runs, Body::most_lanes / cuda::warp_lanes);
  const std::int64_t raw_stride = args.raw == nullptr ? 0 : args.raw_stride;
  const bool whole = whole_heads(args.head_dim, {args.draw_stride, raw_stride}, args.parts,
                                 {args.draw, args.dout, args.raw, args.bias_partials});
  const std::int64_t count = static_cast<std::int64_t>(teams.blocks) * teams.splits;
  for_each_row(space, "layerstream::head_transform_backward", count, Body{args, runs, teams},
               {.whole = whole, .lanes = teams.lanes()});
  if (args.bias_partials != nullptr) {
    add_column_sums(space, "layerstream::head_transform_dbias", args.dbias, args.bias_partials, teams.blocks,
                    args.heads * args.head_dim);
  }
  if (args.norm_partials != nullptr) {
    add_column_sums(space, "layerstream::head_transform_dnorm", args.dnorm_weight, args.norm_partials, count,
                    args.head_dim);
  }
}

/// @throws ContractError for heads longer than 256 pieces of 16 bytes and more than 2^30 tokens.
template <class T, class D>
void run_head_backward(const ExecutionSpace& space, const HeadBackward<T, D>& args) {
  constexpr int width = lane_width<T>, more = 4;
  constexpr std::int64_t most_tokens = std::int64_t{1} << 30;
  if (args.tokens * args.heads == 0) return;
  LAYERSTREAM_EXPECT(args.tokens <= most_tokens && args.heads <= most_tokens,
                     "head_transform_backward: {} tokens of {} heads; the kernel counts up to {}",
                     args.tokens, args.heads, most_tokens);
  const HeadRuns runs = HeadRuns::of(args.heads, args.head_dim, width);
  LAYERSTREAM_EXPECT(runs.pieces <= more * cuda::warp_lanes,
                     "head_transform_backward: heads of {} elements; at most {} fit the kernel",
                     args.head_dim, 2 * more * cuda::warp_lanes * width);
  if (runs.pieces > cuda::warp_lanes) return launch_head_backward<T, D, more, true, true>(space, args, runs);
  const bool norm = args.norm_partials != nullptr, bias = args.bias_partials != nullptr;
  if (!norm) return launch_head_backward<T, D, 1, false, true>(space, args, runs);
  if (!bias) return launch_head_backward<T, D, 1, true, false>(space, args, runs);
  launch_head_backward<T, D, 1, true, true>(space, args, runs);
}

}  // namespace layerstream::ops::detail
