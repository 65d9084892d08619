#pragma once

#include <cstdint>

#include "ops/detail/launch.hpp"

/// Sums over tokens in two steps: every block of rows leaves a partial sum in the workspace, then partial
/// sums are added in the order of blocks. The partition depends on the number of rows alone.
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

template <class A>
struct ColumnSums {
  A* out;             // (columns)
  const A* partials;  // (rows, columns)
  std::int64_t rows, columns;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, int count) const {
    A sum[column_tile] = {};
    for (std::int64_t row = 0; row < rows; ++row) {
      const A* values = partials + row * columns + begin;
      for (int c = 0; c < count; ++c) sum[c] += values[c];
    }
    for (int c = 0; c < count; ++c) out[begin + c] += sum[c];
  }
};

/// out[c] += sum over rows of partials[row, c], rows in order.
template <class A>
void add_column_sums(const ExecutionSpace& space, const char* label, A* out, const A* partials,
                     std::int64_t rows, std::int64_t columns) {
  for_each_column_tile(space, label, columns, ColumnSums<A>{out, partials, rows, columns});
}

}  // namespace layerstream::ops::detail
