#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/cuda/labelled_launch.hpp"
#include "ops/cuda/lane_ring.hpp"
#include "ops/cuda/partial_sums.hpp"
#include "ops/cuda/row_sums.hpp"
#include "ops/detail/execution.hpp"

/// RMSNorm of rows that a block's lanes hold, one or two pieces of 16 bytes each, so that a row is read once.
/// Longer rows: see fits_norm_rows. Either pass finds the same bits of 1 / rms (see RowSums).
namespace layerstream::ops::cuda {

inline constexpr int norm_most_lanes = 512, norm_most_kept = 2;

template <class T>
constexpr bool fits_norm_rows(std::int64_t hidden_size) {
  return hidden_size <= std::int64_t{norm_most_lanes} * norm_most_kept * detail::lane_width<T>;
}

/// Whole warps of lanes that hold a row, `kept` pieces each.
template <class T>
constexpr int norm_lanes(std::int64_t hidden_size, int kept) {
  const std::int64_t per_warp = std::int64_t{warp_lanes} * kept * detail::lane_width<T>;
  return warp_lanes * static_cast<int>(std::max<std::int64_t>(1, (hidden_size + per_warp - 1) / per_warp));
}

/// How the backward pass has its lanes: `Resident` blocks of `MostLanes` lanes to a multiprocessor at least,
/// which bounds the registers of a lane.
template <int Kept, int MostLanes, int Resident>
struct NormBackwardForm {
  static constexpr int kept = Kept, most_lanes = MostLanes, resident = Resident;
};

/// f(form) for the form that rows of this size have; the first is the fastest. @pre fits_norm_rows
template <class T, class F>
constexpr auto with_norm_backward_form(std::int64_t hidden_size, const F& f) {
  const int lanes = norm_lanes<T>(hidden_size, 1);
  if (lanes <= 448) return f(NormBackwardForm<1, 448, 2>());
  if (lanes <= norm_most_lanes) return f(NormBackwardForm<1, norm_most_lanes, 2>());
  return f(NormBackwardForm<2, norm_most_lanes, 1>());
}

/// Blocks of the backward pass, each with every so many-th row: as many as 132 multiprocessors have at once,
/// but never so many that a block has fewer than four rows. Depends on shapes alone, as sums over rows follow
/// it.
template <class T>
constexpr int norm_backward_blocks(std::int64_t tokens, std::int64_t hidden_size) {
  return with_norm_backward_form<T>(hidden_size, [&](auto form) {
    const int resident = form.resident * form.most_lanes / norm_lanes<T>(hidden_size, form.kept);
    return static_cast<int>(std::min<std::int64_t>(132 * std::min(resident, 32), (tokens + 3) / 4));
  });
}

template <class T>
struct NormForward {
  T* y;                             // (T, H)
  const T* x;                       // (T, H)
  const detail::MathOf<T>* weight;  // (H)
  std::int64_t tokens, hidden_size;
  detail::MathOf<T> eps;
};

/// As of RmsNormBackward; y and residual may be null.
template <class T>
struct NormBackward {
  using A = detail::MathOf<T>;
  T* dx;              // (T, H)
  T* y;               // (T, H)
  const T* dy;        // (T, H)
  const T* x;         // (T, H)
  const T* residual;  // (T, H)
  const A* weight;    // (H)
  A* partials;        // (blocks, H)
  std::int64_t tokens, hidden_size;
  A eps;
};

#if defined(__CUDACC__)

/// The pieces of a row that the calling lane has.
template <class T, bool Whole>
struct NormLane {
  static constexpr int width = detail::lane_width<T>;
  int first, step, size;

  __device__ explicit NormLane(std::int64_t hidden_size)
      : first(static_cast<int>(threadIdx.x) * width),
        step(static_cast<int>(blockDim.x) * width),
        size(static_cast<int>(hidden_size)) {}
  __device__ bool has(int k) const { return first + k * step < size; }
  __device__ detail::Piece<width, Whole> piece(int k) const {
    return {first + k * step, size - first - k * step};
  }
};

/// A lane's pieces of one row; zeros where it has none.
template <class T, int Kept, bool Whole>
struct NormPieces {
  static constexpr int width = detail::lane_width<T>;
  detail::HeldPiece<T, width, Whole> held[Kept];

  __device__ void read(const NormLane<T, Whole>& lane, const T* row) {
#pragma unroll
    for (int k = 0; k < Kept; ++k) {
      held[k] = {};
      if (lane.has(k)) held[k].read(lane.piece(k), row);
    }
  }
  /// From pieces `first`, first + 1, ... of a ring's round.
  template <class Ring>
  __device__ void take(const NormLane<T, Whole>& lane, const Ring& ring, int first) {
#pragma unroll
    for (int k = 0; k < Kept; ++k) {
      held[k] = {};
      if (lane.has(k)) held[k] = ring.template take<T, width, Whole>(first + k);
    }
  }
  __device__ detail::Values<T, width> at(int k) const {
    detail::Values<T, width> stored;
    memcpy(stored.at, held[k].words, sizeof stored);
    return stored;
  }
};

template <class T, int Kept, bool Whole>
__device__ void read_norm_weight(const NormLane<T, Whole>& lane, const detail::MathOf<T>* weight,
                                 detail::Values<detail::MathOf<T>, detail::lane_width<T>> (&values)[Kept]) {
#pragma unroll
  for (int k = 0; k < Kept; ++k) {
    values[k] = {};
    if (lane.has(k)) values[k] = detail::load_piece(lane.piece(k), weight);
  }
}

template <class A>
__device__ A norm_inverse(A squares, std::int64_t hidden_size, A eps) {
  return A(1) / Kokkos::sqrt(squares / static_cast<A>(hidden_size) + eps);
}

/// A block has two neighbouring rows, and asks for all of them at once.
template <class T, bool Whole>
__global__ void __launch_bounds__(norm_most_lanes, 2) norm_forward_rows(NormForward<T> args) {
  using A = detail::MathOf<T>;
  constexpr int width = detail::lane_width<T>, kept = norm_most_kept, rows = 2;
  const NormLane<T, Whole> lane(args.hidden_size);
  const std::int64_t first_row = std::int64_t{blockIdx.x} * rows;
  const std::int64_t begin = first_row * args.hidden_size;
  const bool has_second = first_row + 1 < args.tokens;
  NormPieces<T, kept, Whole> x[rows];
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    x[r].read(lane, args.x + begin + (has_second ? r * args.hidden_size : 0));
  }
  detail::Values<A, width> weight[kept];
  read_norm_weight<T>(lane, args.weight, weight);
  RowSums<A, kept> sums(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  A parts[rows][kept] = {}, squares[rows];
#pragma unroll
  for (int r = 0; r < rows; ++r) {
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const auto numbers = widen(x[r].at(k));
      for (int e = 0; e < width; ++e) {
        parts[r][k] = Kokkos::fma(numbers.at[e], numbers.at[e], parts[r][k]);
      }
    }
  }
  sums.add(parts, squares);
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const A inverse = norm_inverse(squares[r], args.hidden_size, args.eps);
    T* const out = args.y + begin + r * args.hidden_size;
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      auto numbers = widen_again(x[r].at(k));
      for (int e = 0; e < width; ++e) numbers.at[e] *= inverse;
      numbers = widen(round_to_stored<T>(numbers));
      for (int e = 0; e < width; ++e) numbers.at[e] *= weight[k].at[e];
      if (lane.has(k) && (r == 0 || has_second)) {
        detail::store_stored(lane.piece(k), out, round_to_stored<T>(numbers));
      }
    }
  }
}

/// What a lane reads ahead in the backward pass: pieces of x, dy and, with one, of the residual.
template <class Form, bool HasResidual>
using NormBackwardRing = LaneRing<(HasResidual ? 3 : 2) * Form::kept, 2, Form::most_lanes>;

/// See RmsNormBackward for the formula. A block walks over rows b, b + blocks, ... The weight and its
/// gradient's sums stay in registers.
template <class T, class Form, bool HasResidual, bool Whole>
__global__ void __launch_bounds__(Form::most_lanes, Form::resident) norm_backward_rows(NormBackward<T> args) {
  using A = detail::MathOf<T>;
  constexpr int width = detail::lane_width<T>, kept = Form::kept;
  using Numbers = detail::Values<A, width>;
  using Ring = NormBackwardRing<Form, HasResidual>;
  extern __shared__ uint4 norm_ring[];
  let_next_start();
  const NormLane<T, Whole> lane(args.hidden_size);
  const std::int64_t stride = gridDim.x * args.hidden_size, end = args.tokens * args.hidden_size;
  std::int64_t begin = blockIdx.x * args.hidden_size;
  Ring ring(norm_ring);
  const auto ask = [&](std::int64_t row) {
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      if (row >= end || !lane.has(k)) continue;
      ring.ask(k, lane.piece(k), args.x + row);
      ring.ask(kept + k, lane.piece(k), args.dy + row);
      if constexpr (HasResidual) ring.ask(2 * kept + k, lane.piece(k), args.residual + row);
    }
    ring.end_round();
  };
  for (int round = 0; round < Ring::depth; ++round) ask(begin + round * stride);
  Numbers weight[kept], dweight[kept] = {};
  read_norm_weight<T>(lane, args.weight, weight);
  RowSums<A, kept> sums(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  const A part = A(1) / static_cast<A>(args.hidden_size);
  for (; begin < end; begin += stride) {
    NormPieces<T, kept, Whole> row_x, row_dy, row_residual;
    ring.wait();
    row_x.take(lane, ring, 0);
    row_dy.take(lane, ring, kept);
    if constexpr (HasResidual) row_residual.take(lane, ring, 2 * kept);
    ask(begin + Ring::depth * stride);
    A parts[2][kept] = {}, totals[2];  // of x², of dy · weight · x
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const Numbers x = widen(row_x.at(k)), gradient = widen(row_dy.at(k));
      for (int e = 0; e < width; ++e) {
        parts[0][k] = Kokkos::fma(x.at[e], x.at[e], parts[0][k]);
        parts[1][k] = Kokkos::fma(gradient.at[e] * weight[k].at[e], x.at[e], parts[1][k]);
      }
    }
    sums.add(parts, totals);
    const A inverse = norm_inverse(totals[0], args.hidden_size, args.eps);
    const A mean = totals[1] * inverse * part;
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      Numbers x = widen_again(row_x.at(k));
      for (int e = 0; e < width; ++e) x.at[e] *= inverse;
      const Numbers gradient = widen_again(row_dy.at(k));
      Numbers rounded = widen(round_to_stored<T>(x));
      for (int e = 0; e < width; ++e) {
        dweight[k].at[e] = Kokkos::fma(gradient.at[e], rounded.at[e], dweight[k].at[e]);
      }
      if (args.y != nullptr && lane.has(k)) {
        for (int e = 0; e < width; ++e) rounded.at[e] *= weight[k].at[e];
        detail::store_stored(lane.piece(k), args.y + begin, round_to_stored<T>(rounded));
      }
      for (int e = 0; e < width; ++e) {
        x.at[e] = Kokkos::fma(x.at[e], -mean, gradient.at[e] * weight[k].at[e]);
      }
      if constexpr (HasResidual) {
        const Numbers bypass = widen(row_residual.at(k));
        for (int e = 0; e < width; ++e) x.at[e] = Kokkos::fma(x.at[e], inverse, bypass.at[e]);
      } else {
        for (int e = 0; e < width; ++e) x.at[e] *= inverse;
      }
      if (lane.has(k)) detail::store_stored(lane.piece(k), args.dx + begin, round_to_stored<T>(x));
    }
  }
  A* const partial = args.partials + blockIdx.x * args.hidden_size;
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    if (lane.has(k)) detail::store_piece(lane.piece(k), partial, dweight[k]);
  }
}

/// @param whole see whole_pieces; @pre fits_norm_rows
template <class T>
void run_norm_forward(const detail::ExecutionSpace& space, const char* label, const NormForward<T>& args,
                      bool whole) {
  if (args.tokens == 0 || args.hidden_size == 0) return;
  const LaunchShape shape{.blocks = static_cast<int>((args.tokens + 1) / 2),
                          .lanes = norm_lanes<T>(args.hidden_size, norm_most_kept)};
  launch_labelled(space, label, shape, whole ? norm_forward_rows<T, true> : norm_forward_rows<T, false>,
                  args);
}

/// @param whole see whole_pieces; @pre fits_norm_rows. Leaves norm_backward_blocks(tokens, hidden_size) rows
/// of partials.
template <class T>
void run_norm_backward(const detail::ExecutionSpace& space, const char* label, const NormBackward<T>& args,
                       bool whole) {
  if (args.tokens == 0 || args.hidden_size == 0) return;
  with_norm_backward_form<T>(args.hidden_size, [&]<class Form>(Form) {
    const int lanes = norm_lanes<T>(args.hidden_size, Form::kept);
    const auto launch = [&]<bool HasResidual>(std::bool_constant<HasResidual>) {
      const LaunchShape shape{.blocks = norm_backward_blocks<T>(args.tokens, args.hidden_size),
                              .lanes = lanes,
                              .shared_bytes = NormBackwardRing<Form, HasResidual>::bytes};
      launch_labelled(space, label, shape,
                      whole ? norm_backward_rows<T, Form, HasResidual, true>
                            : norm_backward_rows<T, Form, HasResidual, false>,
                      args);
    };
    args.residual != nullptr ? launch(std::true_type()) : launch(std::false_type());
  });
}

#endif

}  // namespace layerstream::ops::cuda
