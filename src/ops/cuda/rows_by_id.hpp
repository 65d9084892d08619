#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/cuda/held_piece.hpp"
#include "ops/cuda/labelled_launch.hpp"
#include "ops/cuda/team.hpp"
#include "ops/detail/rows_by_id.hpp"

namespace layerstream::ops::detail {

#if defined(__CUDACC__)

/// What a warp does with a share of the work and a tile of the columns: adds the id's rows to the table, in
/// order. Of an id of few rows it has the whole tile, a few rows at a time. Many rows, which others would
/// wait for, are added to a slice of the tile: of fewer columns, so with more rows under way.
template <class T, bool Whole>
struct RowsOfIdWarp {
  using A = MathOf<T>;
  static constexpr int width = lane_width<T>, pieces = 2;         ///< of a lane
  static constexpr int tile = pieces * cuda::warp_lanes * width;  ///< columns
  const RowsById<T>& args;
  int lane;

  __device__ void operator()(std::uint32_t share, std::int64_t first_column) const {
    const int4 entry = reinterpret_cast<const int4*>(args.by_id)[share];
    const std::int32_t id = entry.y;
    // Of lane 0, so that the compiler knows that it is the same on all lanes.
    const Rows rows{entry.z, __shfl_sync(cuda::all_lanes, entry.w, 0)};
    if (rows.count == 0) return;
    A* const target = args.table + id * args.columns;
    if (rows.count <= few_rows_of_id) {
      add_few(target, first_column, rows);
    } else {
      // Shares of ids of many rows come first, as many of each.
      add_many(target, first_column + share % shares_of_many * slice, rows);
    }
  }

 private:
  static constexpr int narrow = std::max(width / 4, 1), slice = tile / shares_of_many;
  static_assert(slice <= cuda::warp_lanes * narrow);
  static constexpr int few_at_once = 2;

  /// Rows of an id, by places in the order of ids.
  struct Rows {
    std::int32_t first, count;
  };

  /// The row at `at`; anything if there is none.
  __device__ std::int32_t look_at(const Rows& rows, int at) const {
    return at < rows.count ? args.by_id[4 * (std::int64_t{rows.first} + at)] : 0;
  }
  /// @param first an element of row 0
  __device__ const T* in_row(std::int32_t row, const T* first) const {
    const std::uint64_t bytes =
        std::uint64_t{static_cast<std::uint32_t>(row)} * static_cast<std::uint32_t>(args.columns * sizeof(T));
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(first) + bytes);
  }
  template <int N>
  __device__ static void add_to(Values<A, N>& sum, const Values<T, N>& term) {
    const Values<A, N> numbers = cuda::widen(term);
    for (int k = 0; k < N; ++k) sum.at[k] += numbers.at[k];
  }

  __device__ void add_few(A* target, std::int64_t first_column, const Rows& rows) const {
    const std::int32_t looked = look_at(rows, lane);
    Piece<width, Whole> piece[pieces], here[pieces];
    Values<A, width> sum[pieces] = {};
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      const std::int64_t first = first_column + (p * cuda::warp_lanes + lane) * width;
      piece[p] = {first, args.columns - first};
      if (piece[p].available > 0) sum[p] = load_piece(piece[p], target);
      here[p] = {p * cuda::warp_lanes * width, piece[p].available};
    }
    const T* const source = args.rows + piece[0].first;
    for (int done = 0; done < rows.count; done += few_at_once) {
      Values<T, width> terms[few_at_once][pieces];
#pragma unroll
      for (int i = 0; i < few_at_once; ++i) {
        if (done + i >= rows.count) break;
        const std::int32_t row = __shfl_sync(cuda::all_lanes, looked, done + i);
#pragma unroll
        for (int p = 0; p < pieces; ++p) {
          if (piece[p].available > 0) terms[i][p] = load_stored(here[p], in_row(row, source));
        }
      }
#pragma unroll
      for (int i = 0; i < few_at_once; ++i) {
        if (done + i >= rows.count) break;
#pragma unroll
        for (int p = 0; p < pieces; ++p) add_to(sum[p], terms[i][p]);
      }
    }
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      if (piece[p].available > 0) store_piece(piece[p], target, sum[p]);
    }
  }

  /// All rows that the lanes looked at are read before the first is added, and without a branch among them.
  __device__ void add_many(A* target, std::int64_t first_column, const Rows& rows) const {
    if (first_column >= args.columns) return;
    const std::int64_t first = first_column + lane * narrow;
    const bool has_columns = first < args.columns && lane * narrow < slice;
    // Lanes without columns read others'.
    const Piece<narrow, Whole> piece{has_columns ? first : 0, args.columns - (has_columns ? first : 0)};
    const Piece<narrow, Whole> here{0, piece.available};
    Values<A, narrow> sum = load_piece(piece, target);
    std::int32_t looked = look_at(rows, lane);
    for (int begin = 0; begin < rows.count; begin += cuda::warp_lanes) {
      const std::int32_t next = look_at(rows, begin + cuda::warp_lanes + lane);  // under way meanwhile
      Values<T, narrow> terms[cuda::warp_lanes];
#pragma unroll
      for (int i = 0; i < cuda::warp_lanes; ++i) {
        const std::int32_t row = __shfl_sync(cuda::all_lanes, looked, i);
        terms[i] = load_narrow(here, in_row(row, args.rows + piece.first));
      }
#pragma unroll
      for (int i = 0; i < cuda::warp_lanes; ++i) {
        if (begin + i < rows.count) add_to(sum, terms[i]);
      }
      looked = next;
    }
    if (has_columns) store_piece(piece, target, sum);
  }
  /// load_stored, also of whole pieces of four bytes in one access.
  __device__ static Values<T, narrow> load_narrow(const Piece<narrow, Whole>& piece, const T* row) {
    if constexpr (Whole && sizeof(T) * narrow == sizeof(std::uint32_t)) {
      const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(row + piece.first);
      Values<T, narrow> values;
      memcpy(values.at, &word, sizeof values);
      return values;
    } else {
      return load_stored(piece, row);
    }
  }
};

inline constexpr int rows_by_id_warps = 8;  ///< of a block

template <class T, bool Whole>
__global__ void __launch_bounds__(rows_by_id_warps* cuda::warp_lanes, 4)
    add_rows_of_ids(const __grid_constant__ RowsById<T> args) {
  using Warp = RowsOfIdWarp<T, Whole>;
  const auto tiles = static_cast<std::uint32_t>((args.columns + Warp::tile - 1) / Warp::tile);
  const std::uint32_t item = blockIdx.x * rows_by_id_warps + threadIdx.x / cuda::warp_lanes;
  const std::uint32_t share = item / tiles;
  if (share >= args.num_rows) return;
  Warp{args, static_cast<int>(threadIdx.x) % cuda::warp_lanes}(share,
                                                               std::int64_t{item % tiles} * Warp::tile);
}

/// @throws ContractError for more than 2^31 warps or bytes of a row, or for an order that is not aligned,
/// ResourceError if the device cannot run it.
template <class T>
void add_rows_by_id(const ExecutionSpace& space, const RowsById<T>& args) {
  using Warp = RowsOfIdWarp<T, true>;
  if (args.num_rows == 0 || args.columns == 0) return;
  // As many shares as there may be; warps of those that there are not end at once.
  const std::int64_t warps = args.num_rows * ((args.columns + Warp::tile - 1) / Warp::tile);
  LAYERSTREAM_EXPECT(warps <= std::numeric_limits<std::int32_t>::max() &&
                         args.columns <= std::numeric_limits<std::int32_t>::max() / std::int64_t{sizeof(T)},
                     "{}: {} rows of {} columns in one launch", rows_by_id_label, args.num_rows,
                     args.columns);
  LAYERSTREAM_EXPECT(whole_pieces(1, {}, {args.by_id}), "{}: the order of tokens is not aligned to 16 bytes",
                     rows_by_id_label);
  const bool whole = whole_pieces(lane_width<T>, {args.columns}, {args.table, args.rows});
  cuda::launch_labelled(space, rows_by_id_label,
                        {.blocks = static_cast<int>((warps + rows_by_id_warps - 1) / rows_by_id_warps),
                         .lanes = rows_by_id_warps * cuda::warp_lanes},
                        whole ? add_rows_of_ids<T, true> : add_rows_of_ids<T, false>, args);
}

#endif

}  // namespace layerstream::ops::detail
