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
  static constexpr int lanes = 256, most_lanes = lanes, resident_lanes = 768;
  static constexpr int tile = lanes * width;  // columns
  static constexpr int ids_per_lane = 16;     // in one look
  static constexpr int ids_per_look = lanes * ids_per_lane;
  static constexpr int words = ids_per_look / cuda::warp_lanes;
  static constexpr int rows_at_once = 10;
  static_assert(words % cuda::warp_lanes == 0 && words <= lanes && ids_per_look <= 65536);
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
    Values<T, width> own{};  // added after the first look, which hides how long both take to come
    if (has_columns) {
      sum = load_piece(piece, target);
      own = load_stored(piece, rows + row * columns);
    }
    bool is_added = false;
    const auto add_own = [&] {
      if (!is_added) add(sum, widened(own));
      is_added = true;
    };
    // Bit b of word w: row begin + 32 · w + b has the id. Those rows, as offsets from begin, in order.
    __shared__ unsigned found[words];
    __shared__ std::uint16_t offsets[ids_per_look];
    for (std::int64_t begin = row + 1; begin < num_rows; begin += ids_per_look) {
      const unsigned mine = matches(team.lane, id, begin, num_rows);
      const bool found_any = cuda::any_lane(mine != 0);
      add_own();
      if (!found_any) continue;
      for (int i = 0; i < ids_per_lane; ++i) {
        const unsigned word = cuda::lanes_with((mine >> i & 1u) != 0);
        if (team.lane % cuda::warp_lanes == 0) found[i * (lanes / cuda::warp_lanes) + team.warp()] = word;
      }
      __syncthreads();
      const int count = list_offsets(team.lane, found, offsets);
      if (has_columns) add_rows(piece, begin, offsets, count, sum);
      __syncthreads();
    }
    add_own();
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

  /// Where the bits of `found` are, in order. Called by all lanes; a barrier. Returns how many there are.
  static __device__ int list_offsets(int lane, const unsigned* found, std::uint16_t* offsets) {
    __shared__ int of_warp[words / cuda::warp_lanes];
    const bool has_word = lane < words;
    unsigned word = has_word ? found[lane] : 0u;
    const int own = __popc(word);
    int end = own;  // of the word's offsets, counted from the first word of the warp
    for (int distance = 1; distance < cuda::warp_lanes; distance *= 2) {
      const int before = __shfl_up_sync(cuda::all_lanes, end, distance);
      if (lane % cuda::warp_lanes >= distance) end += before;
    }
    if (has_word && lane % cuda::warp_lanes == cuda::warp_lanes - 1) of_warp[lane / cuda::warp_lanes] = end;
    __syncthreads();
    int count = 0;
    for (int warp = 0; warp < words / cuda::warp_lanes; ++warp) {
      if (warp == lane / cuda::warp_lanes) end += count;
      count += of_warp[warp];
    }
    for (int at = end - own; word != 0; word &= word - 1) {
      offsets[at++] = static_cast<std::uint16_t>(cuda::warp_lanes * lane + __ffs(static_cast<int>(word)) - 1);
    }
    __syncthreads();
    return count;
  }

  /// Adds rows begin + offsets[i] in order of i; several are read before the first is added.
  template <bool Whole>
  __device__ void add_rows(const Piece<width, Whole>& piece, std::int64_t begin, const std::uint16_t* offsets,
                           int count, Values<A, width>& sum) const {
    const T* const first = rows + begin * columns;
    for (int done = 0; done < count; done += rows_at_once) {
      Values<T, width> terms[rows_at_once];
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i) {
        if (done + i < count) terms[i] = load_stored(piece, first + offsets[done + i] * columns);
      }
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i) {
        if (done + i < count) add(sum, widened(terms[i]));
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
