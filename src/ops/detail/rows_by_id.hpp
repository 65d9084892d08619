#pragma once

#include <cstdint>

#include "ops/detail/launch.hpp"

namespace layerstream::ops::detail {

/// table[ids[r], :] += rows[r, :] for every r, in the order of r, so with the same bits everywhere.
template <class T>
struct RowsById {
  MathOf<T>* table;           // (V, columns)
  const T* rows;              // (num_rows, columns)
  const std::int32_t* ids;    // (num_rows)
  const std::int32_t* by_id;  // (num_rows, 4): tokens_by_id
  std::int64_t num_rows, columns;
};

/// The shares of an id of more than `few_rows_of_id` rows; any other has one.
inline constexpr int few_rows_of_id = 8, shares_of_many = 8;
static_assert(shares_of_many <= few_rows_of_id + 1, "as many shares as rows at most");

inline constexpr const char* rows_by_id_label = "layerstream::embedding_backward";

#if !defined(KOKKOS_ENABLE_CUDA)

/// Adds every row to a range of columns, so that no two threads meet in a row of the table.
template <class T>
struct RowsToColumns {
  static constexpr std::int64_t tile = 64;  // four cache lines of FP32
  RowsById<T> args;

  void operator()(std::int64_t index) const {
    const std::int64_t begin = index * tile;
    const int count = static_cast<int>(args.columns - begin < tile ? args.columns - begin : tile);
    for (std::int64_t row = 0; row < args.num_rows; ++row) {
      MathOf<T>* target = args.table + args.ids[row] * args.columns + begin;
      const T* terms = args.rows + row * args.columns + begin;
      for (int c = 0; c < count; ++c) target[c] += load(terms[c]);
    }
  }
};

template <class T>
void add_rows_by_id(const ExecutionSpace& space, const RowsById<T>& args) {
  if (args.columns == 0) return;
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t> >;
  constexpr std::int64_t tile = RowsToColumns<T>::tile;
  Kokkos::parallel_for(rows_by_id_label, Policy(space, 0, (args.columns + tile - 1) / tile),
                       RowsToColumns<T>{args});
}

#endif

}  // namespace layerstream::ops::detail
