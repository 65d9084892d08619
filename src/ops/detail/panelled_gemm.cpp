#include "ops/detail/panelled_gemm.hpp"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"

namespace layerstream::ops::detail {
namespace {

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
    group.for_each(columns, [=](std::int64_t i) { out[i] = store_as<To>(load(in[i])); });
  }
};

/// Row `row` of to = addend + from, where `from` is a dense block of floats that is rounded to T first; `to`
/// and `addend` are rows of wider matrices.
template <class T>
struct AddRoundedRow {
  T* to;
  const T* addend;
  const float* from;
  std::int64_t stride, columns;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    T* out = to + row * stride;
    const T* other = addend + row * stride;
    const float* in = from + row * columns;
    group.for_each(columns,
                   [=](std::int64_t i) { out[i] = store_as<T>(load(other[i]) + rounded_to<T>(in[i])); });
  }
};

/// op(operand)[row .. row + rows, column .. column + columns] as a dense FP32 operand in `panel`.
GemmOperand<float> widen(const ExecutionSpace& space, float* panel, const GemmOperand<bf16>& operand,
                         std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns) {
  if (operand.transposed) {
    std::swap(row, column);
    std::swap(rows, columns);
  }
  for_each_row(space, "layerstream::linear_widen", rows,
               ConvertRow<float, bf16>{panel, operand.data + row * operand.leading_dimension + column,
                                       columns, operand.leading_dimension, columns});
  return {panel, columns, operand.transposed};
}

}  // namespace

template <class Out>
void panelled_gemm(const ExecutionSpace& space, float* workspace, const PanelledGemm<Out>& g) {
  constexpr bool rounds = !std::is_same_v<Out, float>;
  float* a_panel = workspace;
  float* b_panel = a_panel + panel_rows * panel_depth;
  float* tile = b_panel + panel_depth * panel_columns;
  const float beta = !rounds && g.addend != nullptr ? 1.0F : 0.0F;
  for (std::int64_t column = 0; column < g.n; column += panel_columns) {
    const std::int64_t columns = std::min(panel_columns, g.n - column);
    for (std::int64_t row = 0; row < g.m; row += panel_rows) {
      const std::int64_t rows = std::min(panel_rows, g.m - row);
      const std::int64_t offset = row * g.n + column;
      for (std::int64_t depth = 0; depth < g.k; depth += panel_depth) {
        const std::int64_t count = std::min(panel_depth, g.k - depth);
        const auto a_part = widen(space, a_panel, g.a, row, depth, rows, count);
        const auto b_part = widen(space, b_panel, g.b, depth, column, count, columns);
        const float first_beta = depth == 0 ? beta : 1.0F;
        if constexpr (rounds) {
          host_gemm(tile, columns, rows, columns, count, a_part, b_part, first_beta);
        } else {
          host_gemm(g.c + offset, g.n, rows, columns, count, a_part, b_part, first_beta);
        }
      }
      if constexpr (rounds) {
        if (g.addend == nullptr) {
          for_each_row(space, "layerstream::linear_round", rows,
                       ConvertRow<Out, float>{g.c + offset, tile, g.n, columns, columns});
        } else {
          for_each_row(space, "layerstream::linear_round_and_add", rows,
                       AddRoundedRow<Out>{g.c + offset, g.addend + offset, tile, g.n, columns});
        }
      }
    }
  }
}

template void panelled_gemm(const ExecutionSpace&, float*, const PanelledGemm<bf16>&);
template void panelled_gemm(const ExecutionSpace&, float*, const PanelledGemm<float>&);

std::size_t panelled_gemm_workspace() {
  return static_cast<std::size_t>(panel_elements) * sizeof(float);
}

}  // namespace layerstream::ops::detail
