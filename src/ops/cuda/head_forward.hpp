#pragma once

#include <span>

#include "ops/cuda/head_walk.hpp"
#include "ops/cuda/labelled_launch.hpp"

/// The head transform's forward direction on a CUDA device: all groups of a call in one launch.
namespace layerstream::ops::detail {

template <class T>
struct HeadForwardGroup {
  HeadForward<T> args;
  HeadRuns runs;
  std::uint32_t raw_stride, out_stride;  ///< elements between tokens

  /// Whether a token costs less than half as much time as others: values, which have neither norm nor rope.
  bool is_light() const { return args.parts.norm_weight == nullptr && args.parts.positions == nullptr; }
};

#if defined(__CUDACC__)

/// Whether a group of a call has a norm.
enum class HeadForwardForm { plain, norm };

/// Of a team, which is alone on its multiprocessor: as many as its registers allow.
constexpr int head_forward_warps(HeadForwardForm form) {
  return form == HeadForwardForm::plain ? 28 : 24;
}

/// What a lane reads of a token: a piece of either half.
template <HeadForwardForm Form>
using HeadForwardRing = cuda::LaneRing<2, 3, head_forward_warps(Form) * cuda::warp_lanes>;

/// One warp for one set of heads of every so many-th token, of at most one piece per lane.
template <class T, class Ring, bool Norm, bool Whole>
struct HeadForwardWarp {
  using A = MathOf<T>;
  static constexpr int width = lane_width<T>;
  using Numbers = Values<A, width>;
  using Walk = HeadWalk<HeadForwardGroup<T>, A, width, 1, false, Whole>;
  const HeadForwardGroup<T>& group;

  __device__ __forceinline__ void operator()(Walk walk, Ring ring) const {
    const HeadForward<T>& args = group.args;
    const HeadPair<width, Whole> pair = walk.pair(0);
    const HeadRows<const T> raw = walk.rows(args.raw, group.raw_stride);
    const HeadRows<T> out = walk.rows(args.out, group.out_stride);
    const auto ask = [&](int ahead) {
      const std::uint32_t token = walk.token(ahead);
      if (walk.is_there(token)) {
        const T* const row = raw.at(token);
        ring.ask(0, pair.lower, row);
        ring.ask(1, pair.upper, row);
      }
      walk.end_round(ahead, ring);
    };
    for (int round = 0; round < Ring::depth; ++round) ask(round);
    walk.ask_for_rope();
    const bool has_bias = args.parts.bias != nullptr;
    const A* const bias = held_argument(args.parts.bias) + (has_bias ? walk.in_heads() : 0);
    [[maybe_unused]] Numbers low_weight{}, high_weight{};
    if constexpr (Norm) {
      if (walk.has_piece()) pair.load(args.parts.norm_weight + walk.in_head(), low_weight, high_weight);
    }
    for (; walk.goes_on(); walk.advance()) {
      const bool live = walk.is_there(walk.token());
      ring.wait();
      Numbers low[1] = {ring.template take<T, width, Whole>(0).numbers()};
      Numbers high[1] = {ring.template take<T, width, Whole>(1).numbers()};
      ask(Ring::depth);
      if (has_bias && live) pair.add(bias, low[0], high[0]);
      if constexpr (Norm) {
        const A inverse = inverse_rms(walk, live, low[0], high[0]);
        for (int e = 0; e < width; ++e) {
          low[0].at[e] = low_weight.at[e] * (low[0].at[e] * inverse);
          high[0].at[e] = high_weight.at[e] * (high[0].at[e] * inverse);
        }
      }
      walk.template turn<false>(0, low, high);
      if (live) pair.store(out.at(walk.token()), low[0], high[0]);
    }
  }

 private:
  /// Over the lanes of a head.
  __device__ A inverse_rms(const Walk& walk, bool live, const Numbers& low, const Numbers& high) const {
    A squares{};
    if (live) {
      for (int e = 0; e < width; ++e) {
        squares = Kokkos::fma(high.at[e], high.at[e], Kokkos::fma(low.at[e], low.at[e], squares));
      }
    }
    squares = cuda::sum_in_run(squares, walk.lanes());
    return A(1) / Kokkos::sqrt(squares * (A(1) / static_cast<A>(group.args.head_dim)) + group.args.parts.eps);
  }
};

template <class T, HeadForwardForm Form, bool Whole>
__global__ void __launch_bounds__(head_forward_warps(Form) * cuda::warp_lanes, 1)
    head_forward_groups(const __grid_constant__ HeadGroups<HeadForwardGroup<T>> args) {
  extern __shared__ uint4 head_ring[];
  const HeadPlace place(args);
  const HeadForwardGroup<T>& group = args.groups[place.group];
  const auto run = [&]<bool Norm>() {
    using Ring = HeadForwardRing<Form>;
    using Warp = HeadForwardWarp<T, Ring, Norm, Whole>;
    Warp{group}(typename Warp::Walk(group, args.teams, place), Ring(head_ring));
  };
  if constexpr (Form == HeadForwardForm::norm) {
    if (group.args.parts.norm_weight != nullptr) return run.template operator()<true>();
  }
  run.template operator()<false>();
}

/// One warp for one head of a token, of any length: what the norm needs is read twice.
template <class T, bool Whole>
struct LongHeadForwardWarp {
  using A = MathOf<T>;
  static constexpr int width = lane_width<T>;
  const HeadForwardGroup<T>& group;
  int lane;  ///< of the warp

  __device__ void operator()(std::int64_t row) const {
    const HeadForward<T>& args = group.args;
    const HeadRuns& runs = group.runs;
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

/// Warps of a block, each with one head of a token.
inline constexpr int long_head_warps = 4;

template <class T, bool Whole>
__global__ void __launch_bounds__(long_head_warps* cuda::warp_lanes)
    long_head_forward(const __grid_constant__ HeadForwardGroup<T> group) {
  const int lane = static_cast<int>(threadIdx.x);
  LongHeadForwardWarp<T, Whole>{
      group, lane % cuda::warp_lanes}(std::int64_t{blockIdx.x} * long_head_warps + lane / cuda::warp_lanes);
}

/// Groups of heads of any length, one launch for each.
template <class T>
void run_long_head_forward(const ExecutionSpace& space, const char* label,
                           std::span<const HeadForwardGroup<T>> groups, bool whole) {
  for (const HeadForwardGroup<T>& group : groups) {
    const std::int64_t rows = group.args.tokens * group.args.heads;
    LAYERSTREAM_EXPECT(rows <= std::numeric_limits<std::int32_t>::max(), "{}: {} heads in one launch", label,
                       rows);
    cuda::launch_labelled(space, label,
                          {.blocks = static_cast<int>((rows + long_head_warps - 1) / long_head_warps),
                           .lanes = long_head_warps * cuda::warp_lanes},
                          whole ? long_head_forward<T, true> : long_head_forward<T, false>, group);
  }
}

/// @pre the groups have the same tokens
/// @throws ContractError for more than head_stride allows, or more than 2^31 long heads of a group.
template <class T>
void run_head_forward(const ExecutionSpace& space, std::span<const HeadForward<T>> groups) {
  constexpr const char* label = "layerstream::head_transform_forward";
  HeadForwardForm form = HeadForwardForm::plain;
  HeadGroups<HeadForwardGroup<T>> all;
  bool whole = true, is_long = false;
  for (const HeadForward<T>& group : groups) {
    if (group.tokens * group.heads * group.head_dim == 0) continue;
    const HeadRuns runs = HeadRuns::of(group.heads, group.head_dim, lane_width<T>);
    const auto stride = [&](std::int64_t elements) {
      return head_stride(label, group.tokens, group.heads, elements);
    };
    all.add({group, runs, stride(group.row_stride), stride(group.heads * group.head_dim)});
    whole = whole && whole_heads(group.head_dim, {group.row_stride}, group.parts, {group.out, group.raw});
    is_long = is_long || runs.pieces > cuda::warp_lanes;
    if (group.parts.norm_weight != nullptr) form = HeadForwardForm::norm;
  }
  if (all.count == 0) return;
  if (is_long) {
    const std::span<const HeadForwardGroup<T>> present(all.groups);
    return run_long_head_forward<T>(space, label, present.first(static_cast<std::size_t>(all.count)), whole);
  }
  all.share_out(head_forward_warps(form), most_head_teams);
  const auto launch = [&]<HeadForwardForm Form>() {
    cuda::launch_labelled(space, label,
                          {.blocks = all.teams.blocks * all.teams.splits,
                           .lanes = all.teams.lanes(),
                           .shared_bytes = HeadForwardRing<Form>::bytes},
                          whole ? head_forward_groups<T, Form, true> : head_forward_groups<T, Form, false>,
                          all);
  };
  form == HeadForwardForm::plain ? launch.template operator()<HeadForwardForm::plain>()
                                 : launch.template operator()<HeadForwardForm::norm>();
}

#endif

}  // namespace layerstream::ops::detail
