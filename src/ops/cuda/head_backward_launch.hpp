#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "ops/cuda/head_backward.hpp"
#include "ops/cuda/labelled_launch.hpp"
#include "ops/cuda/partial_sums.hpp"

/// The head transform's backward direction on a CUDA device: all groups of a call in one launch, and one more
/// for their sums over tokens.
namespace layerstream::ops::detail {

#if defined(__CUDACC__)

/// Which parts a call's groups have: no norm; a norm or a bias, or neither; anything. The last two differ in
/// the length of heads: up to one piece of a half for a lane, and more.
enum class HeadBackwardForm { plain, norm, any, long_heads };

/// Of a team, which is alone on its multiprocessor: as many as its registers allow.
constexpr int head_backward_warps(HeadBackwardForm form) {
  switch (form) {
    case HeadBackwardForm::plain:
      return 28;
    case HeadBackwardForm::norm:
      return 16;
    case HeadBackwardForm::any:
      return 12;
    case HeadBackwardForm::long_heads:
      break;
  }
  return 8;
}

/// Pieces of a half that a lane can have.
constexpr int head_backward_pieces(HeadBackwardForm form) {
  return form == HeadBackwardForm::long_heads ? 4 : 1;
}

/// Shared memory of a team: the longest rings that its lanes have, and after that what its slots add up.
template <HeadBackwardForm Form>
inline constexpr std::size_t head_backward_shared_bytes =
    HeadBackwardRing<head_backward_pieces(Form), Form != HeadBackwardForm::plain,
                     head_backward_warps(Form) * cuda::warp_lanes>::bytes;

/// A lane's sums. Where no group has both, the bias' and the norm's have one place.
template <class T, HeadBackwardForm Form>
struct HeadBackwardSums {
  using Share = HeadShare<MathOf<T>, lane_width<T>, head_backward_pieces(Form)>;
  static constexpr bool both = Form == HeadBackwardForm::any || Form == HeadBackwardForm::long_heads;
  Share shares[both ? 2 : 1];

  __device__ Share& bias() { return shares[0]; }
  __device__ Share& norm() { return shares[both ? 1 : 0]; }
};

/// f.template operator()<Warp>() with the HeadBackwardWarp for a group of a call of this form.
template <class T, HeadBackwardForm Form, bool Whole, class F>
__device__ __forceinline__ void with_head_backward_warp(const HeadBackward<T>& args, const F& f) {
  using A = MathOf<T>;
  constexpr int pieces = head_backward_pieces(Form), lanes = head_backward_warps(Form) * cuda::warp_lanes;
  const auto of_dout = [&]<class D>() {
    if constexpr (Form == HeadBackwardForm::long_heads) {
      f.template operator()<HeadBackwardWarp<T, D, pieces, lanes, true, true, Whole>>();
    } else {
      if constexpr (Form != HeadBackwardForm::plain) {
        constexpr bool bias = Form == HeadBackwardForm::any;
        if (args.parts.norm_weight != nullptr) {
          return f.template operator()<HeadBackwardWarp<T, D, pieces, lanes, true, bias, Whole>>();
        }
      }
      f.template operator()<HeadBackwardWarp<T, D, pieces, lanes, false, true, Whole>>();
    }
  };
  if constexpr (!std::is_same_v<T, A>) {
    if (args.has_wide_dout) return of_dout.template operator()<A>();
  }
  of_dout.template operator()<T>();
}

/// The end of a team: its warps' sums over tokens to partial sums. Within a warp they are added as a tree,
/// then over the team's slots in order.
template <class T, int K, bool Whole>
class HeadBackwardEnd {
 public:
  using A = MathOf<T>;
  static constexpr int width = lane_width<T>;
  using Numbers = Values<A, width>;

  /// @param memory of the team, `width` numbers for each lane
  __device__ HeadBackwardEnd(const HeadBackwardGroup<T>& group, const HeadTeams& teams,
                             const HeadPlace& place, A* memory)
      : group_(group), teams_(teams), place_(place), memory_(memory), lane_(static_cast<int>(threadIdx.x)) {}

  /// Called by all lanes of the team.
  /// @param of_norm whether the warp's sums are the norm's, which its heads share, or the bias'
  __device__ void operator()(const HeadShare<A, width, K>& sums, bool of_norm) const {
    const HeadRuns& runs = group_.runs;
    const std::int32_t in_set = runs.head(lane_), head = place_.set * runs.heads + in_set;
    A* const partials = of_norm ? group_.norm_partials : group_.bias_partials;
    const bool writes = partials != nullptr && place_.slot == 0 && runs.token(lane_) == 0 &&
                        head < runs.all_heads && (!of_norm || in_set == 0);
    const std::int64_t row =
        static_cast<std::int64_t>(place_.block) * (of_norm ? runs.sets() : runs.all_heads) +
        (of_norm ? place_.set : head);
    const int lowest = of_norm ? runs.lanes : runs.lanes * runs.heads;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Numbers low = sum(sums.low[k], lowest), high = sum(sums.high[k], lowest);
      const std::int32_t piece = runs.piece(lane_) + k * runs.lanes;
      if (!writes || piece >= runs.pieces) continue;
      A* const target = partials + row * group_.args.head_dim;
      if (group_.args.has_wide_dout) {
        store<lane_width<A>>(piece, target, low, high);
      } else {
        store<width>(piece, target, low, high);
      }
    }
  }

 private:
  /// Over the runs of a warp whose lanes differ in the bits [lowest, 32), and over slots: right on the lanes
  /// of slot 0.
  __device__ Numbers sum(Numbers sums, int lowest) const {
    A* const of_lane = memory_ + lane_;
    const int lanes = teams_.lanes();
    for (int offset = cuda::warp_lanes / 2; offset >= lowest; offset /= 2) {
      for (int e = 0; e < width; ++e) {
        sums.at[e] += __shfl_xor_sync(cuda::all_lanes, sums.at[e], offset);
      }
    }
    if (teams_.most_slots() == 1) return sums;
    for (int e = 0; e < width; ++e) of_lane[e * lanes] = sums.at[e];
    __syncthreads();
    if (place_.slot == 0) {
#pragma unroll 1
      for (int slot = 1; slot < place_.slots; ++slot) {
        for (int e = 0; e < width; ++e) sums.at[e] += of_lane[e * lanes + slot * cuda::warp_lanes];
      }
    }
    __syncthreads();
    return sums;
  }

  template <int W>
  __device__ void store(std::int32_t piece, A* row, const Numbers& low, const Numbers& high) const {
    Values<A, W> lower, upper;
    for (int e = 0; e < W; ++e) {
      lower.at[e] = low.at[e];
      upper.at[e] = high.at[e];
    }
    group_.runs.template pair<W, Whole>(piece, group_.args.head_dim).store(row, lower, upper);
  }

  const HeadBackwardGroup<T>& group_;
  const HeadTeams& teams_;
  HeadPlace place_;
  A* memory_;
  int lane_;
};

template <class T, HeadBackwardForm Form, bool Whole>
__global__ void __launch_bounds__(head_backward_warps(Form) * cuda::warp_lanes, 1)
    head_backward_groups(const __grid_constant__ HeadGroups<HeadBackwardGroup<T>> args) {
  extern __shared__ uint4 head_ring[];
  cuda::let_next_start();
  const HeadPlace place(args);
  const HeadBackwardGroup<T>& group = args.groups[place.group];
  HeadBackwardSums<T, Form> sums{};
  with_head_backward_warp<T, Form, Whole>(group.args, [&]<class Warp>() {
    Warp{group}(typename Warp::Walk(group, args.teams, place), typename Warp::Ring(head_ring), sums.bias(),
                sums.norm());
  });
  __syncthreads();  // no ring is in use any more
  const HeadBackwardEnd<T, head_backward_pieces(Form), Whole> end(group, args.teams, place,
                                                                  reinterpret_cast<MathOf<T>*>(head_ring));
  if constexpr (sums.both) {
    end(sums.bias(), false);
    end(sums.norm(), true);
  } else {
    end(sums.bias(), group.norm_partials != nullptr);
  }
}

/// Shares out the work, and the workspace by what it then needs.
template <class T>
HeadGroups<HeadBackwardGroup<T>> share_out(std::span<const HeadBackward<T>> groups, HeadBackwardForm form,
                                           MathOf<T>* workspace) {
  HeadGroups<HeadBackwardGroup<T>> all;
  std::int64_t largest = 0, partials = 0;  // elements of a group, of all partials of a block
  for (const HeadBackward<T>& args : groups) {
    const HeadRuns runs = HeadRuns::of(args.heads, args.head_dim, head_backward_width(args));
    const auto stride = [&](std::int64_t elements) {
      return head_stride("head_transform_backward", args.tokens, args.heads, elements);
    };
    const std::int64_t size = args.heads * args.head_dim;
    all.add({.args = args,
             .runs = runs,
             .part = MathOf<T>(1) / static_cast<MathOf<T>>(args.head_dim),
             .dout_stride = stride(size),
             .raw_stride = stride(args.raw_stride),
             .draw_stride = stride(args.draw_stride),
             .bias_partials = nullptr,
             .norm_partials = nullptr});
    largest = std::max(largest, size);
    partials +=
        (args.dbias == nullptr ? 0 : size) + (args.dnorm_weight == nullptr ? 0 : runs.sets() * args.head_dim);
  }
  const std::int64_t have = 2 * head_partial_rows(groups[0].tokens) * largest;
  all.share_out(head_backward_warps(form), partials == 0 ? most_head_teams : have / partials);
  for (std::int32_t g = 0; g < all.count; ++g) {
    HeadBackwardGroup<T>& group = all.groups[g];
    if (group.args.dbias != nullptr) {
      group.bias_partials = workspace;
      workspace += all.teams.blocks * group.args.heads * group.args.head_dim;
    }
    if (group.args.dnorm_weight != nullptr) {
      group.norm_partials = workspace;
      workspace += all.teams.blocks * group.runs.sets() * group.args.head_dim;
    }
  }
  return all;
}

template <class T, HeadBackwardForm Form>
void launch_head_backward(const ExecutionSpace& space, std::span<const HeadBackward<T>> groups,
                          MathOf<T>* workspace) {
  using A = MathOf<T>;
  const HeadGroups<HeadBackwardGroup<T>> args = share_out<T>(groups, Form, workspace);
  const HeadTeams& teams = args.teams;
  bool whole = true;
  static_assert(PartialSums<A>::most >= 2 * most_head_groups, "a bias and a norm for each group");
  PartialSums<A> sums{};
  for (const HeadBackwardGroup<T>& group : std::span(args.groups).first(groups.size())) {
    const HeadBackward<T>& own = group.args;
    whole = whole && whole_heads(own.head_dim, {own.draw_stride, own.raw == nullptr ? 0 : own.raw_stride},
                                 own.parts, {own.draw, own.dout, own.raw, workspace});
    if (group.bias_partials != nullptr) {
      sums.add({own.dbias, group.bias_partials, teams.blocks, own.heads * own.head_dim});
    }
    if (group.norm_partials != nullptr) {
      sums.add({own.dnorm_weight, group.norm_partials,
                static_cast<std::int64_t>(teams.blocks) * group.runs.sets(), own.head_dim});
    }
  }
  cuda::launch_labelled(space, "layerstream::head_transform_backward",
                        {.blocks = teams.blocks * teams.splits,
                         .lanes = teams.lanes(),
                         .shared_bytes = head_backward_shared_bytes<Form>},
                        whole ? head_backward_groups<T, Form, true> : head_backward_groups<T, Form, false>,
                        args);
  run_partial_sums(space, "layerstream::head_transform_sums", sums);
}

/// @param workspace head_partial_rows(T) · 2 · (H · d of the largest group). @pre the groups have the same
/// tokens
/// @throws ContractError for heads of more than 256 pieces of 16 bytes of dout, and see head_stride.
template <class T>
void run_head_backward(const ExecutionSpace& space, std::span<const HeadBackward<T>> groups,
                       MathOf<T>* workspace) {
  constexpr int more = head_backward_pieces(HeadBackwardForm::long_heads);
  std::array<HeadBackward<T>, most_head_groups> present{};
  std::size_t count = 0;
  using Form = HeadBackwardForm;
  Form form = Form::plain;
  for (const HeadBackward<T>& group : groups) {
    if (group.tokens * group.heads * group.head_dim == 0) continue;
    const int width = head_backward_width(group);
    const HeadRuns runs = HeadRuns::of(group.heads, group.head_dim, width);
    LAYERSTREAM_EXPECT(runs.pieces <= more * cuda::warp_lanes,
                       "head_transform_backward: heads of {} elements; at most {} fit the kernel",
                       group.head_dim, 2 * more * cuda::warp_lanes * width);
    const bool has_norm = group.dnorm_weight != nullptr;
    const Form needed = runs.pieces > cuda::warp_lanes       ? Form::long_heads
                        : has_norm && group.dbias != nullptr ? Form::any
                        : has_norm                           ? Form::norm
                                                             : Form::plain;
    form = std::max(form, needed);
    present[count++] = group;
  }
  if (count == 0) return;
  const auto here = std::span<const HeadBackward<T>>(present).first(count);
  switch (form) {
    case Form::plain:
      return launch_head_backward<T, Form::plain>(space, here, workspace);
    case Form::norm:
      return launch_head_backward<T, Form::norm>(space, here, workspace);
    case Form::any:
      return launch_head_backward<T, Form::any>(space, here, workspace);
    case Form::long_heads:
      return launch_head_backward<T, Form::long_heads>(space, here, workspace);
  }
}

#endif

}  // namespace layerstream::ops::detail
