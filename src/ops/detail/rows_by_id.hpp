#pragma once

#include <cstdint>

#include "ops/detail/launch.hpp"

/// add_rows_by_id(space, table, rows, ids, num_rows, columns): table[ids[r], :] += rows[r, :] for every r, in
/// the order of r, so with the same bits everywhere. @param table (V, columns) of A, @param rows (num_rows,
/// columns) of T.
namespace layerstream::ops::detail {

inline constexpr const char* rows_by_id_label = "layerstream::embedding_backward";

#if defined(KOKKOS_ENABLE_CUDA)

/// One team per row and tile of columns. The team of an id's first row adds all rows of that id, the others
/// leave: so no two teams meet in a row of the table. Each reads all ids up to the first that decides, which
/// for 16,384 of them is 64 KiB out of a cache.
template <class T>
struct RowsOfId {
  using A = MathOf<T>;
  static constexpr int width = lane_width<T>;
  static constexpr int lanes = RowLaunch{}.lanes;
  static constexpr int tile = lanes * width;  // columns
  static constexpr int ids_per_lane = 8;      // in one look
  static constexpr int ids_per_look = lanes * ids_per_lane;
  static constexpr int rows_at_once = 8;
  A* table;                 // (V, columns)
  const T* rows;            // (num_rows, columns)
  const std::int32_t* ids;  // (num_rows)
  std::int64_t num_rows, columns, tiles;

  template <bool Whole>
  KOKKOS_FUNCTION void operator()([[maybe_unused]] const cuda::Team<Whole>& team,
                                  [[maybe_unused]] std::int64_t index) const {
#if defined(__CUDA_ARCH__)
    const std::int64_t row = index / tiles, first = index % tiles * tile + team.lane * width;
    const std::int32_t id = ids[row];
    for (std::int64_t begin = 0; begin < row; begin += ids_per_look) {
      if (cuda::any_lane(matches(team.lane, id, begin, row) != 0)) return;
    }
    const Piece<width, Whole> piece{first, columns - first};
    A* const target = table + id * columns;
    const bool has_columns = first < columns;
    Values<A, width> sum{};
    if (has_columns) {
      sum = load_piece(piece, target);
      add(sum, load_piece(piece, rows + row * columns));
    }
    // Bit b of word w: row begin + 32 · w + b has the id.
    __shared__ unsigned found[ids_per_look / cuda::warp_lanes];
    for (std::int64_t begin = row + 1; begin < num_rows; begin += ids_per_look) {
      const unsigned mine = matches(team.lane, id, begin, num_rows);
      if (!cuda::any_lane(mine != 0)) continue;
      for (int i = 0; i < ids_per_lane; ++i) {
        const unsigned word = cuda::lanes_with((mine >> i & 1u) != 0);
        if (team.lane % cuda::warp_lanes == 0) found[i * (lanes / cuda::warp_lanes) + team.warp()] = word;
      }
      __syncthreads();
      if (has_columns) {
        for (int w = 0; w < ids_per_look / cuda::warp_lanes; ++w) {
          add_rows(piece, begin + w * cuda::warp_lanes, found[w], sum);
        }
      }
      __syncthreads();
    }
    if (has_columns) store_piece(piece, target, sum);
#endif
  }

#if defined(__CUDACC__)
  /// Bit i: ids[begin + lanes · i + lane] exists before `end` and is `id`.
  __device__ unsigned matches(int lane, std::int32_t id, std::int64_t begin, std::int64_t end) const {
    unsigned mask = 0;
#pragma unroll
    for (int i = 0; i < ids_per_lane; ++i) {
      const std::int64_t at = begin + lanes * i + lane;
      if (at < end && ids[at] == id) mask |= 1u << i;
    }
    return mask;
  }

  static __device__ void add(Values<A, width>& sum, const Values<A, width>& terms) {
    for (int k = 0; k < width; ++k) sum.at[k] += terms.at[k];
  }

  /// Adds rows begin + b for the bits b of `found`, lowest first; several are read before the first is added.
  template <bool Whole>
  __device__ void add_rows(const Piece<width, Whole>& piece, std::int64_t begin, unsigned found,
                           Values<A, width>& sum) const {
    while (found != 0) {
      Values<T, width> terms[rows_at_once];
      unsigned present = 0;
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i) {
        if (found != 0) {
          const int bit = __ffs(static_cast<int>(found)) - 1;
          terms[i] = load_stored(piece, rows + (begin + bit) * columns);
          present |= 1u << i;
          found &= found - 1;
        }
      }
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i) {
        if ((present >> i & 1u) != 0) add(sum, widened(terms[i]));
      }
    }
  }
#endif
};

template <class T>
void add_rows_by_id(const ExecutionSpace& space, MathOf<T>* table, const T* rows, const std::int32_t* ids,
                    std::int64_t num_rows, std::int64_t columns) {
  using Rows = RowsOfId<T>;
  const std::int64_t tiles = (columns + Rows::tile - 1) / Rows::tile;
  for_each_row(space, rows_by_id_label, num_rows * tiles, Rows{table, rows, ids, num_rows, columns, tiles},
               {.whole = whole_pieces(Rows::width, {columns}, {table, rows}), .lanes = Rows::lanes});
}

#else

/// Adds every row to a range of columns, so that no two threads meet in a row of the table.
template <class T>
struct RowsToColumns {
  using A = MathOf<T>;
  static constexpr std::int64_t tile = 64;  // four cache lines of FP32
  A* table;                                 // (V, columns)
  const T* rows;                            // (num_rows, columns)
  const std::int32_t* ids;                  // (num_rows)
  std::int64_t num_rows, columns;

  void operator()(std::int64_t index) const {
    const std::int64_t begin = index * tile;
    const int count = static_cast<int>(columns - begin < tile ? columns - begin : tile);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      A* target = table + ids[row] * columns + begin;
      const T* terms = rows + row * columns + begin;
      for (int c = 0; c < count; ++c) target[c] += load(terms[c]);
    }
  }
};

template <class T>
void add_rows_by_id(const ExecutionSpace& space, MathOf<T>* table, const T* rows, const std::int32_t* ids,
                    std::int64_t num_rows, std::int64_t columns) {
  if (columns == 0) return;
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t> >;
  constexpr std::int64_t tile = RowsToColumns<T>::tile;
  Kokkos::parallel_for(rows_by_id_label, Policy(space, 0, (columns + tile - 1) / tile),
                       RowsToColumns<T>{table, rows, ids, num_rows, columns});
}

#endif

}  // namespace layerstream::ops::detail
