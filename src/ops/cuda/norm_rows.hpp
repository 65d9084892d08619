#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/labelled_launch.hpp"
#include "ops/cuda/row_ring.hpp"
#include "ops/detail/execution.hpp"

/// RMSNorm of rows that fit a block's registers. A block keeps its part of the weight in registers and walks
/// over rows b, b + blocks, ... with the next ones under way. Longer rows: see fits_norm_rows.
namespace layerstream::ops::cuda {

inline constexpr int norm_kept = 2;                                      ///< pieces of a row to a lane
inline constexpr int norm_forward_stages = 4, norm_backward_stages = 3;  ///< rows of a block in its memory
/// Blocks of 224 lanes that a multiprocessor holds.
inline constexpr int norm_forward_resident = 4, norm_backward_resident = 3;
/// As far as three arrays of the backward pass fit the memory.
inline constexpr int norm_most_lanes =
    std::min<int>(512, most_shared_bytes / ((3 * norm_backward_stages * norm_kept | 1) * 16) / 32 * 32);

template <class T>
constexpr bool fits_norm_rows(std::int64_t hidden_size) {
  return hidden_size <= std::int64_t{norm_most_lanes} * norm_kept * detail::lane_width<T>;
}

template <class T>
constexpr int norm_lanes(std::int64_t hidden_size) {
  constexpr std::int64_t per_warp = std::int64_t{warp_lanes} * norm_kept * detail::lane_width<T>;
  return warp_lanes * static_cast<int>(std::max<std::int64_t>(1, (hidden_size + per_warp - 1) / per_warp));
}

/// Blocks that fill 132 multiprocessors with `resident` blocks of 224 lanes each; more of smaller ones, and
/// never so many that a block has fewer than four rows. Depends on shapes alone, as sums over rows follow it.
template <class T>
constexpr int norm_blocks(std::int64_t tokens, std::int64_t hidden_size, int resident) {
  const int share = std::clamp(224 / norm_lanes<T>(hidden_size), 1, 7);
  return static_cast<int>(std::min<std::int64_t>(132 * resident * share, (tokens + 3) / 4));
}

template <class T>
struct NormForward {
  T* y;                             // (T, H)
  const T* x;                       // (T, H)
  const detail::MathOf<T>* weight;  // (H)
  std::int64_t tokens, hidden_size;
  detail::MathOf<T> eps;
};

/// As of RmsNormBackward; residual may be null.
template <class T>
struct NormBackward {
  using A = detail::MathOf<T>;
  T* dx;              // (T, H)
  const T* dy;        // (T, H)
  const T* x;         // (T, H)
  const T* residual;  // (T, H)
  const A* weight;    // (H)
  A* partials;        // (blocks, H)
  std::int64_t tokens, hidden_size;
  A eps;
};

#if defined(__CUDACC__)

/// Rows of block b: b, b + blocks, ...
__device__ inline int norm_rows_of_block(std::int64_t tokens) {
  return static_cast<int>((tokens - blockIdx.x + gridDim.x - 1) / gridDim.x);
}

template <class T, bool Whole>
__global__ void __launch_bounds__(norm_most_lanes, 2) norm_forward_rows(NormForward<T> args) {
  using A = detail::MathOf<T>;
  constexpr int width = detail::lane_width<T>, kept = norm_kept;
  using Numbers = detail::Values<A, width>;
  const Team<Whole> team{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  const int rows = norm_rows_of_block(args.tokens);
  RowRing<T, 1, kept, norm_forward_stages, Whole> ring(team, {args.x}, args.hidden_size, blockIdx.x,
                                                       gridDim.x, rows);
  Numbers weight[kept] = {};
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    if (ring.has(k)) weight[k] = detail::load_piece(ring.place(k), args.weight + team.lane * width);
  }
  LaneSums<A, 1> lane_sums(team.lane);
  T* out = args.y + blockIdx.x * args.hidden_size + team.lane * width;
  const std::int64_t out_stride = gridDim.x * args.hidden_size;
  const A size = static_cast<A>(args.hidden_size);
  for (int row = 0; row < rows; ++row, out += out_stride) {
    ring.advance();
    Numbers x[kept];
    detail::Values<A, 1> squares{};
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      x[k] = widen(ring.piece(0, k));
      for (int e = 0; e < width; ++e) squares.at[0] = Kokkos::fma(x[k].at[e], x[k].at[e], squares.at[0]);
    }
    lane_sums.add(squares);
    const A inverse = A(1) / Kokkos::sqrt(squares.at[0] / size + args.eps);
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      for (int e = 0; e < width; ++e) x[k].at[e] *= inverse;
      x[k] = widen(round_to_stored<T>(x[k]));
      for (int e = 0; e < width; ++e) x[k].at[e] *= weight[k].at[e];
      if (ring.has(k)) detail::store_stored(ring.place(k), out, round_to_stored<T>(x[k]));
    }
  }
}

/// See RmsNormBackward for the formula. At most 96 registers: three blocks of 224 lanes to a multiprocessor.
template <class T, bool HasResidual, bool Whole>
__global__ void __maxnreg__(96) norm_backward_rows(NormBackward<T> args) {
  using A = detail::MathOf<T>;
  constexpr int width = detail::lane_width<T>, kept = norm_kept, arrays = HasResidual ? 3 : 2;
  using Numbers = detail::Values<A, width>;
  const Team<Whole> team{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  const int rows = norm_rows_of_block(args.tokens);
  const T* const all_inputs[] = {args.x, args.dy, args.residual};
  const T* inputs[arrays];
#pragma unroll
  for (int a = 0; a < arrays; ++a) inputs[a] = all_inputs[a];
  RowRing<T, arrays, kept, norm_backward_stages, Whole> ring(team, inputs, args.hidden_size, blockIdx.x,
                                                             gridDim.x, rows);
  Numbers weight[kept] = {}, dweight[kept] = {};
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    if (ring.has(k)) weight[k] = detail::load_piece(ring.place(k), args.weight + team.lane * width);
  }
  LaneSums<A, 2> lane_sums(team.lane);
  T* out = args.dx + blockIdx.x * args.hidden_size + team.lane * width;
  const std::int64_t out_stride = gridDim.x * args.hidden_size;
  const A size = static_cast<A>(args.hidden_size), part = A(1) / size;
  for (int row = 0; row < rows; ++row, out += out_stride) {
    ring.advance();
    Numbers x[kept], weighted[kept];  // weighted: dy · weight
    detail::Values<A, 2> sums{};      // of x², of dy · weight · x
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      x[k] = widen(ring.piece(0, k));
      weighted[k] = widen(ring.piece(1, k));
      for (int e = 0; e < width; ++e) {
        weighted[k].at[e] *= weight[k].at[e];
        sums.at[0] = Kokkos::fma(x[k].at[e], x[k].at[e], sums.at[0]);
        sums.at[1] = Kokkos::fma(weighted[k].at[e], x[k].at[e], sums.at[1]);
      }
    }
    lane_sums.add(sums);
    const A inverse = A(1) / Kokkos::sqrt(sums.at[0] / size + args.eps);
    const A mean = sums.at[1] * inverse * part;
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      for (int e = 0; e < width; ++e) x[k].at[e] *= inverse;
      const Numbers rounded = widen(round_to_stored<T>(x[k])), gradient = widen(ring.piece(1, k));
      for (int e = 0; e < width; ++e) {
        dweight[k].at[e] = Kokkos::fma(gradient.at[e], rounded.at[e], dweight[k].at[e]);
        x[k].at[e] = Kokkos::fma(x[k].at[e], -mean, weighted[k].at[e]);
      }
      if constexpr (HasResidual) {
        const Numbers bypass = widen(ring.piece(2, k));
        for (int e = 0; e < width; ++e) x[k].at[e] = Kokkos::fma(x[k].at[e], inverse, bypass.at[e]);
      } else {
        for (int e = 0; e < width; ++e) x[k].at[e] *= inverse;
      }
      if (ring.has(k)) detail::store_stored(ring.place(k), out, round_to_stored<T>(x[k]));
    }
  }
  A* const partial = args.partials + blockIdx.x * args.hidden_size + team.lane * width;
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    if (ring.has(k)) detail::store_piece(ring.place(k), partial, dweight[k]);
  }
}

/// @param whole see whole_pieces; @pre fits_norm_rows
template <class T>
void run_norm_forward(const detail::ExecutionSpace& space, const char* label, const NormForward<T>& args,
                      bool whole) {
  if (args.tokens == 0 || args.hidden_size == 0) return;
  const int lanes = norm_lanes<T>(args.hidden_size);
  const LaunchShape shape{.blocks = norm_blocks<T>(args.tokens, args.hidden_size, norm_forward_resident),
                          .lanes = lanes,
                          .shared_bytes = RowRing<T, 1, norm_kept, norm_forward_stages, true>::bytes(lanes)};
  launch_labelled(space, label, shape, whole ? norm_forward_rows<T, true> : norm_forward_rows<T, false>,
                  args);
}

/// @param whole see whole_pieces; @pre fits_norm_rows. Leaves norm_blocks(tokens, hidden_size,
/// norm_backward_resident) rows of partials.
template <class T>
void run_norm_backward(const detail::ExecutionSpace& space, const char* label, const NormBackward<T>& args,
                       bool whole) {
  if (args.tokens == 0 || args.hidden_size == 0) return;
  const int lanes = norm_lanes<T>(args.hidden_size);
  const auto launch = [&]<bool HasResidual>(std::bool_constant<HasResidual>) {
    const LaunchShape shape{.blocks = norm_blocks<T>(args.tokens, args.hidden_size, norm_backward_resident),
                            .lanes = lanes,
                            .shared_bytes = RowRing < T,
                            HasResidual ? 3 : 2,
                            norm_kept,
                            norm_backward_stages,
                            true > ::bytes(lanes)};
    launch_labelled(
        space, label, shape,
        whole ? norm_backward_rows<T, HasResidual, true> : norm_backward_rows<T, HasResidual, false>, args);
  };
  args.residual != nullptr ? launch(std::true_type()) : launch(std::false_type());
}

#endif

}  // namespace layerstream::ops::cuda
