#pragma once

#include "ops/cuda/team.hpp"

namespace layerstream::ops::cuda {

#if defined(__CUDACC__)

/// Two sums over rows of a block's lanes, with one barrier. Lane l of L has the pieces l, L + l, ... of a row
/// (`Kept` of them); 32 neighbouring pieces are a run. The pieces of a run are added as a tree and up to 32
/// runs as another: an order of the row alone, alike for every L and Kept.
template <class A, int Kept>
class RowSums {
 public:
  static constexpr int most_warps = 16;

  /// Called by all lanes; the memory is of the block.
  __device__ RowSums(int lane, int lanes) : lane_(lane), warps_(lanes / warp_lanes) {
    A* const all = &places()[0][0][0];
#pragma unroll 1
    for (int i = lane; i < 2 * 2 * runs; i += lanes) all[i] = A(0);
    __syncthreads();
  }

  /// @param parts the lane's part of either sum, piece by piece; totals are alike on all lanes. Places for
  /// what the runs have take turns, so that no lane waits for the readers of the last ones.
  __device__ void add(const A (&parts)[2][Kept], A (&totals)[2]) {
    A folded[2 * Kept];
#pragma unroll
    for (int i = 0; i < 2 * Kept; ++i) folded[i] = parts[i / Kept][i % Kept];
    const int in_warp = lane_ % warp_lanes;
    fold<Kept, warp_lanes / 2>(folded, in_warp);
    auto& of_run = places()[turn_];
    turn_ ^= 1;
    constexpr int lanes_of_part = warp_lanes / (2 * Kept);
    if (in_warp % lanes_of_part == 0) {
      const int part = in_warp / lanes_of_part;
      of_run[part / Kept][part % Kept * warps_ + lane_ / warp_lanes] = folded[0];
    }
    __syncthreads();
    // Half a warp has one sum, the other half the other.
    const auto& mine = of_run[in_warp / most_warps];
    A total = mine[in_warp % most_warps];
    if constexpr (Kept == 2) total += mine[in_warp % most_warps + most_warps];
    total = sum_in_run(total, most_warps);
    totals[0] = __shfl_sync(all_lanes, total, 0);
    totals[1] = __shfl_sync(all_lanes, total, most_warps);
  }

 private:
  static_assert(Kept == 1 || Kept == 2);
  static constexpr int runs = most_warps * Kept;
  using Places = A[2][2][runs];
  static __device__ Places& places() {
    __shared__ Places memory;
    return memory;
  }

  /// Adds the first 2 * Half values over a warp, each with the bits of sum_across_warp; lane l gets that of
  /// index l / (32 / values) in folded[0].
  template <int Half, int Offset, int Count>
  static __device__ void fold(A (&folded)[Count], int lane) {
    if constexpr (Half >= 1) {
      const bool upper = (lane & Offset) != 0;
#pragma unroll
      for (int i = 0; i < Half; ++i) {
        const A kept = upper ? folded[i + Half] : folded[i], sent = upper ? folded[i] : folded[i + Half];
        folded[i] = kept + __shfl_xor_sync(all_lanes, sent, Offset);
      }
      fold<Half / 2, Offset / 2>(folded, lane);
    } else {
      folded[0] = sum_in_run(folded[0], 2 * Offset);
    }
  }

  int lane_, warps_, turn_ = 0;
};

#endif

}  // namespace layerstream::ops::cuda
