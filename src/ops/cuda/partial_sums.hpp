#pragma once

#include "ops/cuda/labelled_launch.hpp"
#include "ops/detail/partials.hpp"

/// The second step of sums over tokens (see detail/partials.hpp): all sums of a call in one launch, which is
/// under way while the first step ends.
namespace layerstream::ops::detail {

/// out += sums over rows, see ColumnSums.
template <class A>
struct PartialSum {
  A* out;         // (columns)
  const A* rows;  // (num_rows, columns)
  std::int64_t num_rows, columns;
};

template <class A>
struct PartialSums {
  static constexpr int most = 8;
  PartialSum<A> sums[most];
  std::int32_t end_block[most];  ///< of missing ones that of the last
  std::int32_t count;

  void add(const PartialSum<A>& sum) {
    const auto tiles =
        static_cast<std::int32_t>((sum.columns + ColumnSums<A>::tile - 1) / ColumnSums<A>::tile);
    sums[count] = sum;
    const std::int32_t end = (count == 0 ? 0 : end_block[count - 1]) + tiles;
    for (int i = count; i < most; ++i) end_block[i] = end;
    ++count;
  }
};

#if defined(__CUDACC__)

template <class A, bool Whole>
__global__ void __launch_bounds__(ColumnSums<A>::most_lanes)
    add_partial_sums(const __grid_constant__ PartialSums<A> args) {
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  int index = 0;
#pragma unroll
  for (int i = 0; i + 1 < PartialSums<A>::most; ++i) index += block >= args.end_block[i] ? 1 : 0;
  const PartialSum<A> sum = args.sums[index];
  const std::int32_t begin = index == 0 ? 0 : args.end_block[index - 1];
  cuda::wait_for_last();
  const cuda::Team<Whole> team{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  ColumnSums<A>{sum.out, sum.rows, sum.num_rows, sum.columns}(team, block - begin);
}

/// @pre the kernel before on the stream has written all rows; best if it calls
/// cuda::let_next_start
template <class A>
void run_partial_sums(const ExecutionSpace& space, const char* label, const PartialSums<A>& args) {
  if (args.count == 0) return;
  bool whole = true;
  for (int i = 0; i < args.count; ++i) {
    whole = whole && whole_pieces(ColumnSums<A>::width, {args.sums[i].columns}, {args.sums[i].rows});
  }
  cuda::launch_labelled(
      space, label,
      {.blocks = args.end_block[args.count - 1], .lanes = ColumnSums<A>::most_lanes, .starts_early = true},
      whole ? add_partial_sums<A, true> : add_partial_sums<A, false>, args);
}

#endif

}  // namespace layerstream::ops::detail
