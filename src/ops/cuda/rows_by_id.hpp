#pragma once

#include <algorithm>

#include "ops/cuda/held_piece.hpp"
#include "ops/cuda/labelled_launch.hpp"
#include "ops/cuda/team.hpp"
#include "ops/detail/rows_by_id.hpp"

namespace layerstream::ops::detail {

#if defined(__CUDACC__)

/// What a warp does that has a place in the order and a tile of the columns; there is one for each. At the
/// first place of an id it adds all rows of that id, and elsewhere nothing. Many rows, which others would
/// wait for, are shared by the warps of the id's first `slices` places: each has a slice of the tile, of
/// fewer elements a lane and so with more rows under way.
template <class T, bool Whole>
struct RowsOfIdWarp {
  using A = MathOf<T>;
  static constexpr int width = lane_width<T>, pieces = 2;         ///< of a lane
  static constexpr int tile = pieces * cuda::warp_lanes * width;  ///< columns
  static constexpr int narrow = std::max(width / 4, 1), slices = tile / (cuda::warp_lanes * narrow);
  static constexpr int few = 16, few_at_once = 2, many_at_once = 32;
  static_assert(few >= slices - 1, "an id whose rows are shared has a place for each slice");
  const RowsById<T>& args;
  int lane;

  __device__ void operator()(std::int64_t place, std::int64_t first_column) const {
    // Lane l looks at place - slices + l: an id's first `slices` places know their number.
    const Look look = look_at(place - slices);
    const std::int32_t id = __shfl_sync(cuda::all_lanes, look.id, slices);
    const unsigned same = cuda::lanes_with(look.id == id);
    const int number = __clz(static_cast<int>(~(same << (cuda::warp_lanes - slices))));
    if (number >= slices) return;
    const int begin = slices - number, here = ones(same >> begin);
    const Rows rows{place - number, __shfl_down_sync(cuda::all_lanes, look.row, begin), here,
                    cuda::warp_lanes - begin};
    if (here > few) {
      add<many_at_once, 1, narrow>(first_column + number * (tile / slices), id, rows);
    } else if (number == 0) {
      add<few_at_once, pieces, width>(first_column, id, rows);
    }
  }

 private:
  struct Look {
    std::int32_t row, id;  // -1: none
  };
  /// Neighbouring places of an id: lane i has the row of the i-th.
  struct Rows {
    std::int64_t first;
    std::int32_t row;
    int count, looked_at;
  };

  __device__ Look look_at(std::int64_t first) const {
    const std::int64_t at = first + lane;
    if (at < 0 || at >= args.num_rows) return {-1, -1};
    const std::int64_t key = args.by_id[at];
    return {static_cast<std::int32_t>(key), static_cast<std::int32_t>(key >> 32)};
  }
  /// How many of the lowest bits are set without a gap.
  __device__ static int ones(unsigned bits) { return bits == ~0u ? 32 : __ffs(static_cast<int>(~bits)) - 1; }

  /// Adds all rows of the id to the lane's `Pieces` pieces of its row of the table, in order; AtOnce rows are
  /// read before the first is added. Called by all lanes.
  template <int AtOnce, int Pieces, int N>
  __device__ void add(std::int64_t first_column, std::int32_t id, Rows rows) const {
    A* const target = args.table + id * args.columns;
    Piece<N, Whole> piece[Pieces];
    Values<A, N> sum[Pieces] = {};
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
      const std::int64_t first = first_column + (p * cuda::warp_lanes + lane) * N;
      piece[p] = {first, args.columns - first};
      if (piece[p].available > 0) sum[p] = load_piece(piece[p], target);
    }
    for (;;) {
      const std::int64_t next = rows.first + rows.count;
      const bool may_go_on = rows.count == rows.looked_at;
      const Look look = may_go_on ? look_at(next) : Look{-1, -1};  // under way while rows are added
      for (int done = 0; done < rows.count; done += AtOnce) {
        Values<T, N> terms[AtOnce][Pieces];
#pragma unroll
        for (int i = 0; i < AtOnce; ++i) {
          if (done + i >= rows.count) break;
          const std::int32_t row = __shfl_sync(cuda::all_lanes, rows.row, done + i);
#pragma unroll
          for (int p = 0; p < Pieces; ++p) {
            if (piece[p].available > 0) terms[i][p] = load_word(piece[p], args.rows + row * args.columns);
          }
        }
#pragma unroll
        for (int i = 0; i < AtOnce; ++i) {
          if (done + i >= rows.count) break;
#pragma unroll
          for (int p = 0; p < Pieces; ++p) {
            const Values<A, N> numbers = cuda::widen(terms[i][p]);
            for (int k = 0; k < N; ++k) sum[p].at[k] += numbers.at[k];
          }
        }
      }
      if (!may_go_on) break;
      rows = {next, look.row, ones(cuda::lanes_with(look.id == id)), cuda::warp_lanes};
    }
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
      if (piece[p].available > 0) store_piece(piece[p], target, sum[p]);
    }
  }
  /// load_stored, also of whole pieces of four bytes in one access.
  template <int N>
  __device__ static Values<T, N> load_word(const Piece<N, Whole>& piece, const T* row) {
    if constexpr (Whole && N * sizeof(T) == sizeof(std::uint32_t)) {
      const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(row + piece.first);
      Values<T, N> values;
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
  const std::int64_t tiles = (args.columns + Warp::tile - 1) / Warp::tile;
  const std::int64_t item = std::int64_t{blockIdx.x} * rows_by_id_warps + threadIdx.x / cuda::warp_lanes;
  const std::int64_t place = item / tiles;
  if (place >= args.num_rows) return;
  Warp{args, static_cast<int>(threadIdx.x) % cuda::warp_lanes}(place, item % tiles * Warp::tile);
}

/// @throws ContractError for more than 2^34 warps, ResourceError if the device cannot run it.
template <class T>
void add_rows_by_id(const ExecutionSpace& space, const RowsById<T>& args) {
  using Warp = RowsOfIdWarp<T, true>;
  if (args.num_rows == 0 || args.columns == 0) return;
  const std::int64_t warps = args.num_rows * ((args.columns + Warp::tile - 1) / Warp::tile);
  const std::int64_t blocks = (warps + rows_by_id_warps - 1) / rows_by_id_warps;
  LAYERSTREAM_EXPECT(blocks <= std::numeric_limits<std::int32_t>::max(),
                     "{}: {} rows of {} columns in one launch", rows_by_id_label, args.num_rows,
                     args.columns);
  const bool whole = whole_pieces(lane_width<T>, {args.columns}, {args.table, args.rows});
  cuda::launch_labelled(space, rows_by_id_label,
                        {.blocks = static_cast<int>(blocks), .lanes = rows_by_id_warps * cuda::warp_lanes},
                        whole ? add_rows_of_ids<T, true> : add_rows_of_ids<T, false>, args);
}

#endif

}  // namespace layerstream::ops::detail
