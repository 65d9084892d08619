#include "ops/norm.hpp"

#include <algorithm>
#include <type_traits>

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#include "ops/detail/partials.hpp"
#if defined(KOKKOS_ENABLE_CUDA)
#include "ops/cuda/norm_rows.hpp"
#endif

namespace layerstream::ops {
namespace {

using detail::lane_width;
using detail::load;
using detail::load_piece;
using detail::load_stored;
using detail::MathOf;
using detail::rounded_to;
using detail::store_as;
using detail::store_piece;
using detail::Values;
using detail::whole_pieces;
using detail::widened;

/// Lanes of a team that shares a row, at most. Each lane keeps `Kept` pieces of a row in registers; what is
/// longer than all of them is read again from memory.
constexpr int most_lanes = 512;

template <class T, int Kept>
int lanes_for(std::int64_t hidden_size) {
  constexpr std::int64_t per_warp = std::int64_t{32} * Kept * lane_width<T>;
  const std::int64_t warps = (hidden_size + per_warp - 1) / per_warp;
  return static_cast<int>(32 * std::clamp<std::int64_t>(warps, 1, most_lanes / 32));
}

/// 1 / sqrt(mean(x^2) + eps) of one row.
template <class T, class Group>
KOKKOS_INLINE_FUNCTION MathOf<T> inverse_rms(const Group& group, const T* x, std::int64_t hidden_size,
                                             MathOf<T> eps) {
  using A = MathOf<T>;
  const A squares = group.template sum<A>(hidden_size, [=](std::int64_t i) {
    const A value = load(x[i]);
    return value * value;
  });
  return A(1) / Kokkos::sqrt(squares / static_cast<A>(hidden_size) + eps);
}

/// A lane's pieces of one row, read from memory once.
template <class T, int Kept>
struct KeptPieces {
  static constexpr int width = lane_width<T>;
  const T* row;
  std::int64_t size;
  Values<T, width> kept[Kept];

  template <class Team>
  KOKKOS_INLINE_FUNCTION KeptPieces(const Team& team, const T* row_, std::int64_t size_)
      : row(row_), size(size_) {
    LAYERSTREAM_UNROLL
    for (int k = 0; k < Kept; ++k) {
      const auto piece = team.template piece<width>(k, size);
      if (piece.first < size) kept[k] = load_stored(piece, row);
    }
  }

  /// Piece k, widened. @pre the lane has it
  template <bool IsKept, class Piece>
  KOKKOS_INLINE_FUNCTION Values<MathOf<T>, width> at(std::bool_constant<IsKept>, int k,
                                                     const Piece& piece) const {
    if constexpr (IsKept) return widened(kept[k]);
    return load_piece(piece, row);
  }
};

/// f(k, piece) for every piece k of the lane; those that are kept are unrolled, so that they stay in
/// registers.
template <int W, int Kept, class Team, class F>
KOKKOS_INLINE_FUNCTION void for_each_of_lane(const Team& team, std::int64_t size, const F& f) {
  LAYERSTREAM_UNROLL
  for (int k = 0; k < Kept; ++k) {
    const auto piece = team.template piece<W>(k, size);
    if (piece.first < size) f(std::true_type(), k, piece);
  }
  for (int k = Kept;; ++k) {
    const auto piece = team.template piece<W>(k, size);
    if (piece.first >= size) break;
    f(std::false_type(), k, piece);
  }
}

template <class T>
struct RmsNormRow {
  using A = MathOf<T>;
  static constexpr int most_lanes = ops::most_lanes;
  static constexpr int kept = 2;
  T* y;             // (T, H)
  const T* x;       // (T, H)
  const A* weight;  // (H)
  std::int64_t hidden_size;
  A eps;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const T* in = x + row * hidden_size;
    T* out = y + row * hidden_size;
    const A* w = weight;
    if constexpr (Group::is_team) {
      constexpr int width = lane_width<T>;
      const KeptPieces<T, kept> values(group, in, hidden_size);
      A squares{};
      for_each_of_lane<width, kept>(group, hidden_size, [&](auto is_kept, int k, const auto& piece) {
        const auto terms = values.at(is_kept, k, piece);
        for (int e = 0; e < width; ++e) squares += terms.at[e] * terms.at[e];
      });
      squares = group.sum_of_lanes(squares);
      const A inverse = A(1) / Kokkos::sqrt(squares / static_cast<A>(hidden_size) + eps);
      for_each_of_lane<width, kept>(group, hidden_size, [&](auto is_kept, int k, const auto& piece) {
        auto result = values.at(is_kept, k, piece);
        const auto factor = load_piece(piece, w);
        for (int e = 0; e < width; ++e) result.at[e] = factor.at[e] * rounded_to<T>(result.at[e] * inverse);
        store_piece(piece, out, result);
      });
    } else {
      const A inverse = inverse_rms(group, in, hidden_size, eps);
      group.for_each(hidden_size, [=](std::int64_t i) {
        out[i] = store_as<T>(w[i] * rounded_to<T>(load(in[i]) * inverse));
      });
    }
  }
};

/// With n = x / rms(x) and g = dy · weight: dx = (g − n · mean(g · n)) / rms(x), dweight = sum of dy · n
/// over rows, where n is the rounded value that met the weight in the forward pass.
template <class T, int Kept>
struct RmsNormBackwardBlock {
  using A = MathOf<T>;
  static constexpr int most_lanes = ops::most_lanes;
  static constexpr int width = lane_width<T>;
  T* dx;              // (T, H)
  const T* dy;        // (T, H)
  const T* x;         // (T, H)
  const T* residual;  // (T, H) or nullptr
  const A* weight;    // (H)
  A* partials;        // (blocks, H)
  std::int64_t tokens, hidden_size, rows_per_block;
  A eps;
  T* y;  // (T, H) or nullptr

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t block) const {
    A* dweight = partials + block * hidden_size;
    const std::int64_t begin = block * rows_per_block;
    const std::int64_t end = begin + rows_per_block < tokens ? begin + rows_per_block : tokens;
    if constexpr (Group::is_team) {
      Values<A, width> sums[Kept] = {};
      for_each_of_lane<width, Kept>(group, hidden_size, [&](auto is_kept, int k, const auto& piece) {
        if constexpr (!is_kept) store_piece(piece, dweight, Values<A, width>{});
      });
      for (std::int64_t row = begin; row < end; ++row) team_row(group, row, sums, dweight);
      for_each_of_lane<width, Kept>(group, hidden_size, [&](auto is_kept, int k, const auto& piece) {
        if constexpr (is_kept) store_piece(piece, dweight, sums[k]);
      });
    } else {
      group.for_each(hidden_size, [=](std::int64_t i) { dweight[i] = A(0); });
      for (std::int64_t row = begin; row < end; ++row) serial_row(group, row, dweight);
    }
  }

  template <class Team>
  KOKKOS_INLINE_FUNCTION void team_row(const Team& team, std::int64_t row, Values<A, width>* sums,
                                       A* dweight) const {
    const std::int64_t offset = row * hidden_size;
    const bool has_residual = residual != nullptr;
    const KeptPieces<T, Kept> values(team, x + offset, hidden_size);
    const KeptPieces<T, Kept> gradients(team, dy + offset, hidden_size);
    const KeptPieces<T, Kept> bypass(team, has_residual ? residual + offset : nullptr,
                                     has_residual ? hidden_size : 0);
    A squares{}, dot{};
    for_each_of_lane<width, Kept>(team, hidden_size, [&](auto is_kept, int k, const auto& piece) {
      const auto value = values.at(is_kept, k, piece), gradient = gradients.at(is_kept, k, piece);
      const auto w = load_piece(piece, weight);
      for (int e = 0; e < width; ++e) {
        squares += value.at[e] * value.at[e];
        dot += gradient.at[e] * w.at[e] * value.at[e];
      }
    });
    team.sum_of_lanes(squares, dot);
    const A inverse = A(1) / Kokkos::sqrt(squares / static_cast<A>(hidden_size) + eps);
    const A mean = dot * inverse / static_cast<A>(hidden_size);
    for_each_of_lane<width, Kept>(team, hidden_size, [&](auto is_kept, int k, const auto& piece) {
      auto result = values.at(is_kept, k, piece);
      const auto gradient = gradients.at(is_kept, k, piece);
      const auto w = load_piece(piece, weight);
      Values<A, width> terms, rounded;
      for (int e = 0; e < width; ++e) {
        const A normalised = result.at[e] * inverse;
        rounded.at[e] = rounded_to<T>(normalised);
        terms.at[e] = gradient.at[e] * rounded.at[e];
        result.at[e] = inverse * (gradient.at[e] * w.at[e] - normalised * mean);
      }
      if (has_residual) {
        const auto added = bypass.at(is_kept, k, piece);
        for (int e = 0; e < width; ++e) result.at[e] = added.at[e] + result.at[e];
      }
      store_piece(piece, dx + offset, result);
      if (y != nullptr) {
        for (int e = 0; e < width; ++e) rounded.at[e] *= w.at[e];
        store_piece(piece, y + offset, rounded);
      }
      if constexpr (is_kept) {
        for (int e = 0; e < width; ++e) sums[k].at[e] += terms.at[e];
      } else {
        auto sum = load_piece(piece, dweight);
        for (int e = 0; e < width; ++e) sum.at[e] += terms.at[e];
        store_piece(piece, dweight, sum);
      }
    });
  }

  template <class Group>
  KOKKOS_INLINE_FUNCTION void serial_row(const Group& group, std::int64_t row, A* dweight) const {
    const std::int64_t offset = row * hidden_size;
    const T* in = x + offset;
    const T* grad = dy + offset;
    const T* bypass = residual == nullptr ? nullptr : residual + offset;
    T* out = dx + offset;
    const A* w = weight;
    const A inverse = inverse_rms(group, in, hidden_size, eps);
    const A dot = group.template sum<A>(
        hidden_size, [=](std::int64_t i) { return load(grad[i]) * w[i] * (load(in[i]) * inverse); });
    const A mean = dot / static_cast<A>(hidden_size);
    const auto gradient_at = [=](std::int64_t i) {
      const A g = load(grad[i]);
      const A normalised = load(in[i]) * inverse;
      dweight[i] += g * rounded_to<T>(normalised);
      return inverse * (g * w[i] - normalised * mean);
    };
    if (bypass == nullptr) {
      group.for_each(hidden_size, [=](std::int64_t i) { out[i] = store_as<T>(gradient_at(i)); });
    } else {
      group.for_each(hidden_size,
                     [=](std::int64_t i) { out[i] = store_as<T>(load(bypass[i]) + gradient_at(i)); });
    }
    if (y == nullptr) return;
    T* again = y + offset;
    group.for_each(hidden_size, [=](std::int64_t i) {
      again[i] = store_as<T>(w[i] * rounded_to<T>(load(in[i]) * inverse));
    });
  }
};

/// Rows of partial sums that the backward pass leaves in the workspace.
template <class T>
std::int64_t partial_rows(std::int64_t tokens, [[maybe_unused]] std::int64_t hidden_size) {
#if defined(KOKKOS_ENABLE_CUDA)
  if (cuda::fits_norm_rows<T>(hidden_size)) {
    return cuda::norm_backward_blocks<T>(tokens, hidden_size);
  }
#endif
  return detail::row_blocks(tokens).count;
}

}  // namespace

void rms_norm_forward(const Context& context, TensorView y, ConstTensorView x, ConstTensorView weight,
                      double eps) {
  constexpr const char* operation = "rms_norm_forward";
  detail::expect_rank(operation, "x", x, 2);
  const std::int64_t tokens = x.dim(0), hidden_size = x.dim(1);
  detail::expect_tensor(operation, "y", y, x.dtype(), x.shape());
  detail::expect_tensor(operation, "weight", weight, accumulator_of(x.dtype()), {hidden_size});
  detail::dispatch_compute(x.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using A = MathOf<T>;
    constexpr const char* label = "layerstream::rms_norm_forward";
    const bool whole = whole_pieces(lane_width<T>, {hidden_size}, {y.data(), x.data(), weight.data()});
#if defined(KOKKOS_ENABLE_CUDA)
    if (cuda::fits_norm_rows<T>(hidden_size)) {
      return cuda::run_norm_forward<T>(
          detail::execution_space(context), label,
          {y.as<T>(), x.as<T>(), weight.as<A>(), tokens, hidden_size, static_cast<A>(eps)}, whole);
    }
#endif
    detail::for_each_row(
        detail::execution_space(context), label, tokens,
        RmsNormRow<T>{y.as<T>(), x.as<T>(), weight.as<A>(), hidden_size, static_cast<A>(eps)},
        {.whole = whole, .lanes = lanes_for<T, RmsNormRow<T>::kept>(hidden_size)});
  });
}

void rms_norm_backward(const Context& context, const RmsNormBackward& args) {
  constexpr const char* operation = "rms_norm_backward";
  const ConstTensorView x = args.x;
  detail::expect_rank(operation, "x", x, 2);
  const std::int64_t tokens = x.dim(0), hidden_size = x.dim(1);
  const DType accumulator = accumulator_of(x.dtype());
  detail::expect_tensor(operation, "dx", args.dx, x.dtype(), x.shape());
  detail::expect_tensor(operation, "dy", args.dy, x.dtype(), x.shape());
  if (args.residual) detail::expect_tensor(operation, "residual", args.residual, x.dtype(), x.shape());
  if (args.y) detail::expect_tensor(operation, "y", args.y, x.dtype(), x.shape());
  detail::expect_tensor(operation, "weight", args.weight, accumulator, {hidden_size});
  detail::expect_tensor(operation, "dweight", args.dweight, accumulator, {hidden_size});
  detail::dispatch_compute(x.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using A = MathOf<T>;
    const auto& space = detail::execution_space(context);
    const detail::RowBlocks blocks = detail::row_blocks(tokens);
    constexpr const char* label = "layerstream::rms_norm_backward";
    A* partials = detail::workspace_as<A>(operation, context,
                                          rms_norm_backward_workspace(tokens, hidden_size, x.dtype()));
    const T* residual = args.residual ? args.residual.as<T>() : nullptr;
    T* y = args.y ? args.y.as<T>() : nullptr;
    const bool whole =
        whole_pieces(lane_width<T>, {hidden_size},
                     {args.dx.data(), y, args.dy.data(), x.data(), residual, args.weight.data(), partials});
    const auto add_partials = [&](std::int64_t rows) {
      detail::add_column_sums(space, "layerstream::rms_norm_dweight", args.dweight.as<A>(), partials, rows,
                              hidden_size);
    };
#if defined(KOKKOS_ENABLE_CUDA)
    if (cuda::fits_norm_rows<T>(hidden_size)) {
      cuda::run_norm_backward<T>(
          space, label,
          {args.dx.as<T>(), y, args.dy.as<T>(), x.as<T>(), residual, args.weight.as<A>(), partials, tokens,
           hidden_size, static_cast<A>(args.eps)},
          whole);
      const std::int64_t rows = partial_rows<T>(tokens, hidden_size);
      if (rows >= cuda::ColumnTileSums<A>::fewest_rows) return add_partials(rows);
      detail::PartialSums<A> sums{};
      if (rows > 0) sums.add({args.dweight.as<A>(), partials, rows, hidden_size});
      return detail::run_partial_sums(space, "layerstream::rms_norm_dweight", sums);
    }
#endif
    const auto launch = [&]<int Kept>(std::integral_constant<int, Kept>) {
      detail::for_each_row(
          space, label, blocks.count,
          RmsNormBackwardBlock<T, Kept>{args.dx.as<T>(), args.dy.as<T>(), x.as<T>(), residual,
                                        args.weight.as<A>(), partials, tokens, hidden_size,
                                        blocks.rows_per_block, static_cast<A>(args.eps), y},
          {.whole = whole, .lanes = lanes_for<T, Kept>(hidden_size)});
    };
    // One piece per lane leaves registers for all that a lane keeps; two cover rows twice as long.
    if (detail::runs_on_host || hidden_size <= most_lanes * lane_width<T>) {
      launch(std::integral_constant<int, 1>());
    } else {
      launch(std::integral_constant<int, 2>());
    }
    add_partials(blocks.count);
  });
}

std::size_t rms_norm_backward_workspace(std::int64_t tokens, std::int64_t hidden_size, DType compute) {
  std::int64_t rows = 0;
  detail::dispatch_compute(compute, "rms_norm_backward_workspace", [&](auto tag) {
    rows = partial_rows<typename decltype(tag)::Type>(tokens, hidden_size);
  });
  return static_cast<std::size_t>(rows * hidden_size) * size_of(accumulator_of(compute));
}

}  // namespace layerstream::ops
