#pragma once

#include <limits>

#include "ops/cuda/head_pieces.hpp"

/// The head transform's forward direction on a CUDA device.
namespace layerstream::ops::detail {

/// One warp for up to Units groups of heads of a token (or of several, see HeadRuns): all of their reads are
/// under way at once, and the rope's angles are read once. For heads of at most one piece per lane.
template <class T, int Units, bool Norm>
struct HeadForwardTeam {
  using A = MathOf<T>;
  static constexpr int most_lanes = 128;
  static constexpr int resident_lanes = Units == 1 ? (Norm ? 768 : 1024) : (Norm ? 512 : 640);
  static constexpr int width = lane_width<T>;
  using Numbers = Values<A, width>;
  HeadForward<T> args;
  HeadRuns runs;
  std::int32_t shares;  ///< warps that share the heads of a token
  std::int32_t units;   ///< groups of a share, at most Units

  template <bool Whole>
  KOKKOS_FUNCTION void operator()(const cuda::Team<Whole>& team, std::int64_t index) const {
    const auto item = static_cast<std::uint32_t>(index) * static_cast<std::uint32_t>(team.warps()) +
                      static_cast<std::uint32_t>(team.warp());
    const std::uint32_t share = item % static_cast<std::uint32_t>(shares);
    const std::int64_t token =
        static_cast<std::int64_t>(item / static_cast<std::uint32_t>(shares)) * runs.tokens +
        runs.token(team.lane);
    const std::int32_t first_head =
        static_cast<std::int32_t>(share) * units * runs.heads + runs.head(team.lane);
    const std::int32_t own = runs.piece(team.lane);
    // Lanes without elements take part in the sums of their warp.
    const bool exists = token < args.tokens && own < runs.pieces;
    const bool has_rope = args.parts.positions != nullptr;
    const auto pair = runs.template pair<width, Whole>(own, args.head_dim);
    const std::int32_t position = exists && has_rope ? args.parts.positions[token] : 0;

    HeldHead<T, width, Whole> held[Units] = {};
    const T* const raw = args.raw + token * args.row_stride + first_head * args.head_dim;
    const std::int64_t step = runs.heads * args.head_dim;
    LAYERSTREAM_UNROLL
    for (int u = 0; u < Units; ++u) {
      if (exists && has(u, first_head)) pair.read(raw + u * step, held[u]);
    }
    Rope<A, width> rope{};
    if (exists && has_rope) rope.read(args.parts, position, runs.half, pair.lower);
    [[maybe_unused]] Numbers low_weight{}, high_weight{};
    if constexpr (Norm) {
      if (exists) pair.load(args.parts.norm_weight, low_weight, high_weight);
    }

    T* const out = args.out + (token * args.heads + first_head) * args.head_dim;
    const A* const bias = args.parts.bias == nullptr ? nullptr : args.parts.bias + first_head * args.head_dim;
    LAYERSTREAM_UNROLL
    for (int u = 0; u < Units; ++u) {
      if (u >= units) break;
      const bool live = exists && has(u, first_head);
      Numbers low = held[u].low.numbers(), high = held[u].high.numbers();
      if (live && bias != nullptr) pair.add(bias + u * step, low, high);
      if constexpr (Norm) {
        A squares{};
        for (int e = 0; e < width; ++e) {
          squares = Kokkos::fma(high.at[e], high.at[e], Kokkos::fma(low.at[e], low.at[e], squares));
        }
        squares = cuda::sum_in_run(squares, runs.lanes);
        const A inverse = A(1) / Kokkos::sqrt(squares / static_cast<A>(args.head_dim) + args.parts.eps);
        for (int e = 0; e < width; ++e) {
          low.at[e] = low_weight.at[e] * (low.at[e] * inverse);
          high.at[e] = high_weight.at[e] * (high.at[e] * inverse);
        }
      }
      if (has_rope) rope.turn(low, high);
      if (live) pair.store(out + u * step, low, high);
    }
  }

 private:
  KOKKOS_FORCEINLINE_FUNCTION bool has(int unit, std::int32_t first_head) const {
    return unit < units && first_head + unit * runs.heads < runs.all_heads;
  }
};

/// One warp for one head of a token, of any length: what the norm needs is read twice.
template <class T>
struct LongHeadForwardTeam {
  using A = MathOf<T>;
  static constexpr int most_lanes = 128;
  static constexpr int width = lane_width<T>;
  HeadForward<T> args;
  HeadRuns runs;

  template <bool Whole>
  KOKKOS_FUNCTION void operator()(const cuda::Team<Whole>& team, std::int64_t index) const {
    const std::int64_t row = index * team.warps() + team.warp();
    const std::int32_t pieces = row < args.tokens * args.heads ? runs.pieces : 0;
    const std::int64_t token = row / args.heads, head = row % args.heads;
    const T* const raw = args.raw + token * args.row_stride + head * args.head_dim;
    const A* const bias = args.parts.bias == nullptr ? nullptr : args.parts.bias + head * args.head_dim;
    const bool has_norm = args.parts.norm_weight != nullptr;
    Values<A, width> low, high;
    A inverse(1);
    if (has_norm) {
      A squares{};
      for (std::int32_t i = runs.piece(team.lane); i < pieces; i += runs.lanes) {
        const auto pair = runs.template pair<width, Whole>(i, args.head_dim);
        pair.load(raw, low, high);
        if (bias != nullptr) pair.add(bias, low, high);
        for (int e = 0; e < width; ++e) squares += low.at[e] * low.at[e] + high.at[e] * high.at[e];
      }
      squares = cuda::sum_in_run(squares, runs.lanes);
      inverse = A(1) / Kokkos::sqrt(squares / static_cast<A>(args.head_dim) + args.parts.eps);
    }
    for (std::int32_t i = runs.piece(team.lane); i < pieces; i += runs.lanes) {
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

template <class T, int Units, bool Norm>
void launch_head_forward(const ExecutionSpace& space, const char* label, const HeadForward<T>& args,
                         const HeadRuns& runs, bool whole) {
  using Body = HeadForwardTeam<T, Units, Norm>;
  const std::int32_t groups = runs.groups(), shares = (groups + Units - 1) / Units;
  const std::int64_t warps = (args.tokens + runs.tokens - 1) / runs.tokens * shares;
  constexpr int per_team = Body::most_lanes / cuda::warp_lanes;
  for_each_row(space, label, (warps + per_team - 1) / per_team,
               Body{args, runs, shares, (groups + shares - 1) / shares},
               {.whole = whole, .lanes = Body::most_lanes});
}

template <class T>
void run_head_forward(const ExecutionSpace& space, const char* label, const HeadForward<T>& args) {
  const std::int64_t rows = args.tokens * args.heads;
  LAYERSTREAM_EXPECT(rows <= std::numeric_limits<std::int32_t>::max(), "{}: {} heads in one launch", label,
                     rows);
  if (rows == 0) return;
  const HeadRuns runs = HeadRuns::of(args.heads, args.head_dim, lane_width<T>);
  const bool whole = whole_heads(args.head_dim, {args.row_stride}, args.parts, {args.out, args.raw});
  if (runs.pieces > cuda::warp_lanes) {
    using Body = LongHeadForwardTeam<T>;
    constexpr int per_team = Body::most_lanes / cuda::warp_lanes;
    return for_each_row(space, label, (rows + per_team - 1) / per_team, Body{args, runs},
                        {.whole = whole, .lanes = Body::most_lanes});
  }
  constexpr int many = 4;
  const bool norm = args.parts.norm_weight != nullptr, one = runs.groups() == 1;
  if (one && !norm) return launch_head_forward<T, 1, false>(space, label, args, runs, whole);
  if (one) return launch_head_forward<T, 1, true>(space, label, args, runs, whole);
  if (!norm) return launch_head_forward<T, many, false>(space, label, args, runs, whole);
  launch_head_forward<T, many, true>(space, label, args, runs, whole);
}

}  // namespace layerstream::ops::detail
