#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "ops/cuda/held_piece.hpp"
#include "ops/cuda/labelled_launch.hpp"
#include "ops/cuda/team.hpp"
#include "ops/detail/execution.hpp"

/// Sums over the rows of a matrix in one launch: a cluster of blocks has a tile of columns, and adds what its
/// blocks found through their shared memory.
namespace layerstream::ops::cuda {

template <class T>
struct ColumnTileSums {
  using A = detail::MathOf<T>;
  static constexpr int width = detail::lane_width<T>;
  static constexpr int lanes = 512, run = 16;  ///< lanes of a block; lanes side by side in a row
  static constexpr int tile = run * width;     ///< columns
  static constexpr int cluster = 8;            ///< blocks
  static constexpr int at_once = 8;            ///< rows that a lane reads before it adds
  /// From here on a cluster has enough to do for each of its lanes.
  static constexpr std::int64_t fewest_rows = 1024;
  A* out;         // (columns); added to
  const T* rows;  // (num_rows, columns)
  std::int64_t num_rows, columns;
};

#if defined(__CUDACC__)

/// A lane adds rows in order, then the runs of a warp, the warps of a block and the blocks of a cluster are
/// added in order.
template <class T, bool Whole>
__global__ void __launch_bounds__(512, 2) add_column_tiles(ColumnTileSums<T> args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Args = ColumnTileSums<T>;
  using A = typename Args::A;
  constexpr int width = Args::width, warps = Args::lanes / warp_lanes, share = Args::tile / Args::cluster;
  constexpr int rows_of_block = Args::lanes / Args::run, rows_of_cluster = rows_of_block * Args::cluster;
  __shared__ A of_warp[warps][Args::tile];
  __shared__ A of_block[Args::tile];
  const auto cluster = cooperative_groups::this_cluster();
  const int lane = static_cast<int>(threadIdx.x), rank = static_cast<int>(cluster.block_rank());
  const std::int64_t tile_begin = std::int64_t{blockIdx.x} / Args::cluster * Args::tile;
  const std::int64_t first = tile_begin + lane % Args::run * width;
  const detail::Piece<width, Whole> piece{first, args.columns - first};

  // Read early what is added to last.
  const std::int64_t column = tile_begin + rank * share + lane;
  const bool writes = lane < share && column < args.columns;
  const A before = writes ? args.out[column] : A(0);

  detail::Values<A, width> sums{};
  if (piece.available > 0) {
    for (std::int64_t row = rank * rows_of_block + lane / Args::run; row < args.num_rows;
         row += Args::at_once * rows_of_cluster) {
      detail::Values<T, width> terms[Args::at_once];
#pragma unroll
      for (int i = 0; i < Args::at_once; ++i) {
        const std::int64_t at = row + i * rows_of_cluster;
        terms[i] =
            at < args.num_rows ? load_once(piece, args.rows + at * args.columns) : detail::Values<T, width>{};
      }
#pragma unroll
      for (int i = 0; i < Args::at_once; ++i) {
        const auto numbers = widen(terms[i]);
        for (int k = 0; k < width; ++k) sums.at[k] += numbers.at[k];
      }
    }
  }
  for (int k = 0; k < width; ++k) {
    const A sum = sum_across_warp(sums.at[k], Args::run);
    if (lane % warp_lanes < Args::run) of_warp[lane / warp_lanes][lane % Args::run * width + k] = sum;
  }
  __syncthreads();
  if (lane < Args::tile) {
    A total{};
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) total += of_warp[warp][lane];
    of_block[lane] = total;
  }
  cluster.sync();
  if (writes) {
    A total{};
#pragma unroll
    for (int block = 0; block < Args::cluster; ++block) {
      total += *cluster.map_shared_rank(&of_block[rank * share + lane], static_cast<unsigned>(block));
    }
    args.out[column] = before + total;
  }
  cluster.sync();  // no block leaves while others read its memory
#else
  (void)args;
#endif
}

/// out += sums over rows. @param whole see whole_pieces; @pre has_clusters, num_rows > 0
template <class T>
void run_column_tiles(const detail::ExecutionSpace& space, const char* label, const ColumnTileSums<T>& args,
                      bool whole) {
  using Args = ColumnTileSums<T>;
  const std::int64_t tiles = (args.columns + Args::tile - 1) / Args::tile;
  if (tiles == 0) return;
  launch_labelled(
      space, label,
      {.blocks = static_cast<int>(tiles) * Args::cluster, .lanes = Args::lanes, .cluster = Args::cluster},
      whole ? add_column_tiles<T, true> : add_column_tiles<T, false>, args);
}

#endif

}  // namespace layerstream::ops::cuda
