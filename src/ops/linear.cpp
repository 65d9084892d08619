#include "ops/linear.hpp"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/host_gemm.hpp"
#include "ops/detail/launch.hpp"

namespace layerstream::ops {
namespace {

using detail::GemmOperand;
using detail::MathOf;

/// Panels of a bf16 product: `panel_rows` rows of a times `panel_columns` columns of b, `panel_depth` of
/// the inner extent at a time, in FP32. Deep enough for the BLAS, wide enough that converting an operand
/// again for every panel of the other one stays below a few percent of the multiplications.
constexpr std::int64_t panel_rows = 1024;
constexpr std::int64_t panel_columns = 1024;
constexpr std::int64_t panel_depth = 2048;
constexpr std::int64_t panel_elements =
    (panel_rows + panel_columns) * panel_depth + panel_rows * panel_columns;

/// Row `row` of a dense block of floats, from or into rows of a wider matrix.
template <class To, class From>
struct ConvertRow {
  To* to;
  const From* from;
  std::int64_t to_stride, from_stride, columns;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    To* out = to + row * to_stride;
    const From* in = from + row * from_stride;
    group.for_each(columns, [=](std::int64_t i) { out[i] = detail::store_as<To>(detail::load(in[i])); });
  }
};

/// op(operand)[row .. row + rows, column .. column + columns] as a dense FP32 operand in `panel`.
GemmOperand<float> widen(const detail::ExecutionSpace& space, float* panel, const GemmOperand<bf16>& operand,
                         std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns) {
  if (operand.transposed) {
    std::swap(row, column);
    std::swap(rows, columns);
  }
  detail::for_each_row(space, "layerstream::linear_widen", rows,
                       ConvertRow<float, bf16>{panel, operand.data + row * operand.leading_dimension + column,
                                               columns, operand.leading_dimension, columns});
  return {panel, columns, operand.transposed};
}

/// c = a · b + beta · c with bf16 operands; sums are FP32 over the whole inner extent, and bf16 results
/// are rounded once, from a tile that stays in the workspace until its last panel is added.
template <class Out>
void panelled_gemm(const detail::ExecutionSpace& space, float* workspace, Out* c, std::int64_t m,
                   std::int64_t n, std::int64_t k, const GemmOperand<bf16>& a, const GemmOperand<bf16>& b,
                   float beta) {
  float* a_panel = workspace;
  float* b_panel = a_panel + panel_rows * panel_depth;
  float* tile = b_panel + panel_depth * panel_columns;
  for (std::int64_t column = 0; column < n; column += panel_columns) {
    const std::int64_t columns = std::min(panel_columns, n - column);
    for (std::int64_t row = 0; row < m; row += panel_rows) {
      const std::int64_t rows = std::min(panel_rows, m - row);
      Out* target = c + row * n + column;
      for (std::int64_t depth = 0; depth < k; depth += panel_depth) {
        const std::int64_t count = std::min(panel_depth, k - depth);
        const auto a_part = widen(space, a_panel, a, row, depth, rows, count);
        const auto b_part = widen(space, b_panel, b, depth, column, count, columns);
        const float first_beta = depth == 0 ? beta : 1.0F;
        if constexpr (std::is_same_v<Out, float>) {
          detail::host_gemm(target, n, rows, columns, count, a_part, b_part, first_beta);
        } else {
          detail::host_gemm(tile, columns, rows, columns, count, a_part, b_part, first_beta);
        }
      }
      if constexpr (!std::is_same_v<Out, float>) {
        detail::for_each_row(space, "layerstream::linear_round", rows,
                             ConvertRow<Out, float>{target, tile, n, columns, columns});
      }
    }
  }
}

struct Extents {
  std::int64_t m, n, k;
};

/// out = a · b + beta · out; `compute` is the dtype of a and b, out has it or its accumulator's.
void multiply(const char* operation, const Context& context, const TensorView& out, Extents extents,
              const ConstTensorView& a, bool a_transposed, const ConstTensorView& b, bool b_transposed,
              double beta) {
  const auto [m, n, k] = extents;
  LAYERSTREAM_EXPECT(k > 0 || beta != 0.0, "{}: no inner extent", operation);
  const std::int64_t a_stride = a_transposed ? m : k, b_stride = b_transposed ? k : n;
  detail::dispatch_compute(a.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using A = MathOf<T>;
    const GemmOperand<T> left{a.as<T>(), a_stride, a_transposed}, right{b.as<T>(), b_stride, b_transposed};
    if constexpr (std::is_same_v<T, A>) {
      detail::host_gemm(out.as<A>(), n, m, n, k, left, right, static_cast<A>(beta));
    } else {
      const auto space = detail::execution_space(context.stream);
      A* workspace = detail::workspace_as<A>(operation, context, linear_workspace(a.dtype()));
      if (out.dtype() == a.dtype()) {
        panelled_gemm(space, workspace, out.as<T>(), m, n, k, left, right, static_cast<A>(beta));
      } else {
        panelled_gemm(space, workspace, out.as<A>(), m, n, k, left, right, static_cast<A>(beta));
      }
    }
  });
}

}  // namespace

void linear_forward(const Context& context, TensorView y, ConstTensorView x, ConstTensorView w) {
  constexpr const char* operation = "linear_forward";
  detail::expect_rank(operation, "x", x, 2);
  detail::expect_rank(operation, "w", w, 2);
  const std::int64_t tokens = x.dim(0), in = x.dim(1), out = w.dim(0);
  const bool rounded = y.dtype() == x.dtype();
  detail::expect_tensor(operation, "x", x, x.dtype(), x.shape());
  detail::expect_tensor(operation, "w", w, x.dtype(), {out, in});
  detail::expect_tensor(operation, "y", y, rounded ? x.dtype() : accumulator_of(x.dtype()), {tokens, out});
  multiply(operation, context, y, {tokens, out, in}, x, false, w, true, 0.0);
}

void linear_backward_input(const Context& context, TensorView dx, ConstTensorView dy, ConstTensorView w) {
  constexpr const char* operation = "linear_backward_input";
  detail::expect_rank(operation, "dy", dy, 2);
  detail::expect_rank(operation, "w", w, 2);
  const std::int64_t tokens = dy.dim(0), in = w.dim(1), out = w.dim(0);
  detail::expect_tensor(operation, "dy", dy, dy.dtype(), {tokens, out});
  detail::expect_tensor(operation, "w", w, dy.dtype(), {out, in});
  detail::expect_tensor(operation, "dx", dx, dy.dtype(), {tokens, in});
  multiply(operation, context, dx, {tokens, in, out}, dy, false, w, false, 0.0);
}

void linear_backward_weight(const Context& context, TensorView dw, ConstTensorView dy, ConstTensorView x) {
  constexpr const char* operation = "linear_backward_weight";
  detail::expect_rank(operation, "dy", dy, 2);
  detail::expect_rank(operation, "x", x, 2);
  const std::int64_t tokens = dy.dim(0), in = x.dim(1), out = dy.dim(1);
  detail::expect_tensor(operation, "dy", dy, dy.dtype(), {tokens, out});
  detail::expect_tensor(operation, "x", x, dy.dtype(), {tokens, in});
  detail::expect_tensor(operation, "dw", dw, accumulator_of(dy.dtype()), {out, in});
  multiply(operation, context, dw, {out, in, tokens}, dy, true, x, false, 1.0);
}

std::size_t linear_workspace(DType compute) {
  return compute == DType::bf16 ? static_cast<std::size_t>(panel_elements) * sizeof(float) : 0;
}

}  // namespace layerstream::ops
