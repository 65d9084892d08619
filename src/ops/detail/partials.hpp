#pragma once

#include <cstdint>

#include "ops/detail/launch.hpp"
#if defined(KOKKOS_ENABLE_CUDA)
#include "ops/cuda/column_sums.hpp"
#endif

/// Sums over tokens in two steps: every block of rows leaves a partial sum in the workspace, then
/// add_column_sums adds the partial sums. The partition depends on the number of rows alone.
///
/// add_column_sums(space, label, out, rows, num_rows, columns): out[c] += sum over r of rows[r, c]; on a CPU
/// in order of r, on a device in an order that depends on num_rows alone.
namespace layerstream::ops::detail {

struct RowBlocks {
  std::int64_t rows_per_block;
  std::int64_t count;
};

/// Blocks of 16 rows, or longer ones so that there are never more than 512.
constexpr RowBlocks row_blocks(std::int64_t rows) {
  constexpr std::int64_t shortest = 16, most = 512;
  const std::int64_t even = (rows + most - 1) / most;
  const std::int64_t rows_per_block = even > shortest ? even : shortest;
  return {rows_per_block, (rows + rows_per_block - 1) / rows_per_block};
}

#if defined(KOKKOS_ENABLE_CUDA)

/// Sums of `tile` neighbouring columns by one team: runs of lanes read 16 bytes each of rows g, g + runs,
/// ...; then the runs of a warp are added as a tree, and the warps in order.
template <class T>
struct ColumnSums {
  using A = MathOf<T>;
  static constexpr int most_lanes = 1024;
  static constexpr int tile = 32;
  static constexpr int width = lane_width<T>;
  static constexpr int run = tile / width;
  static constexpr int rows_at_once = 4;  // that a lane reads before it adds
  A* out;                                 // (columns)
  const T* rows;                          // (num_rows, columns)
  std::int64_t num_rows, columns;

  template <bool Whole>
  KOKKOS_FUNCTION void operator()([[maybe_unused]] const cuda::Team<Whole>& team,
                                  [[maybe_unused]] std::int64_t index) const {
#if defined(__CUDA_ARCH__)
    const std::int64_t first = index * tile + team.lane % run * width;
    const Piece<width, Whole> piece{first, columns - first};
    const std::int64_t column = index * tile + team.lane;
    const bool writes = team.lane < tile && column < columns;
    const A before = writes ? out[column] : A(0);  // early, as it takes long to come
    Values<A, width> sums{};
    if (first < columns) {
      const std::int64_t step = team.lanes / run;
      for (std::int64_t row = team.lane / run; row < num_rows; row += rows_at_once * step) {
        Values<T, width> terms[rows_at_once];
#pragma unroll
        for (int i = 0; i < rows_at_once; ++i) {
          const std::int64_t at = row + i * step;
          terms[i] = at < num_rows ? load_stored(piece, rows + at * columns) : Values<T, width>{};
        }
#pragma unroll
        for (int i = 0; i < rows_at_once; ++i) {
          const Values<A, width> numbers = widened(terms[i]);
          for (int k = 0; k < width; ++k) sums.at[k] += numbers.at[k];
        }
      }
    }
    __shared__ A of_warp[most_lanes / cuda::warp_lanes][tile];
    for (int k = 0; k < width; ++k) {
      const A sum = cuda::sum_across_warp(sums.at[k], run);
      if (team.lane % cuda::warp_lanes < run) of_warp[team.warp()][team.lane % run * width + k] = sum;
    }
    __syncthreads();
    if (!writes) return;
    A total{};
    for (int warp = 0; warp < team.warps(); ++warp) total += of_warp[warp][team.lane];
    out[column] = before + total;
#endif
  }
};

template <class T>
void add_column_sums(const ExecutionSpace& space, const char* label, MathOf<T>* out, const T* rows,
                     std::int64_t num_rows, std::int64_t columns) {
  using Sums = ColumnSums<T>;
  if (num_rows == 0) return;
  const bool whole = whole_pieces(Sums::width, {columns}, {rows});
  if constexpr (cuda::has_clusters) {
    if (num_rows >= cuda::ColumnTileSums<T>::fewest_rows) {
      return cuda::run_column_tiles<T>(space, label, {out, rows, num_rows, columns}, whole);
    }
  }
  for_each_row(space, label, (columns + Sums::tile - 1) / Sums::tile, Sums{out, rows, num_rows, columns},
               {.whole = whole, .lanes = Sums::most_lanes});
}

#else

/// Sums of a range of columns by one thread, rows in order.
template <class T>
struct ColumnSums {
  using A = MathOf<T>;
  static constexpr std::int64_t tile = 64;  // four cache lines of FP32
  A* out;                                   // (columns)
  const T* rows;                            // (num_rows, columns)
  std::int64_t num_rows, columns;

  void operator()(std::int64_t index) const {
    const std::int64_t begin = index * tile;
    const int count = static_cast<int>(columns - begin < tile ? columns - begin : tile);
    A sum[tile] = {};
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const T* values = rows + row * columns + begin;
      for (int c = 0; c < count; ++c) sum[c] += load(values[c]);
    }
    for (int c = 0; c < count; ++c) out[begin + c] += sum[c];
  }
};

template <class T>
void add_column_sums(const ExecutionSpace& space, const char* label, MathOf<T>* out, const T* rows,
                     std::int64_t num_rows, std::int64_t columns) {
  if (columns == 0) return;
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t> >;
  constexpr std::int64_t tile = ColumnSums<T>::tile;
  Kokkos::parallel_for(label, Policy(space, 0, (columns + tile - 1) / tile),
                       ColumnSums<T>{out, rows, num_rows, columns});
}

#endif

}  // namespace layerstream::ops::detail
