#include "ops/linear.hpp"

#include "ops/detail/check.hpp"
#include "ops/detail/gemm.hpp"

namespace layerstream::ops {
namespace {

void multiply(const char* operation, const Context& context, const detail::GemmArguments& arguments) {
  if (arguments.out.numel() == 0) return;
  LAYERSTREAM_EXPECT(arguments.k() > 0 || arguments.accumulates_in_place(), "{}: no inner extent", operation);
  if (arguments.k() == 0) return;
  detail::gemm(operation, context, arguments);
}

}  // namespace

void linear_forward(const Context& context, TensorView y, ConstTensorView x, ConstTensorView w,
                    ConstTensorView residual) {
  constexpr const char* operation = "linear_forward";
  detail::expect_rank(operation, "x", x, 2);
  detail::expect_rank(operation, "w", w, 2);
  const std::int64_t tokens = x.dim(0), in = x.dim(1), out = w.dim(0);
  const bool rounded = y.dtype() == x.dtype();
  detail::expect_tensor(operation, "x", x, x.dtype(), x.shape());
  detail::expect_tensor(operation, "w", w, x.dtype(), {out, in});
  detail::expect_tensor(operation, "y", y, rounded ? x.dtype() : accumulator_of(x.dtype()), {tokens, out});
  if (residual) detail::expect_tensor(operation, "residual", residual, y.dtype(), {tokens, out});
  multiply(operation, context, {.out = y, .a = x, .b = w, .b_transposed = true, .addend = residual});
}

void linear_backward_input(const Context& context, TensorView dx, ConstTensorView dy, ConstTensorView w) {
  constexpr const char* operation = "linear_backward_input";
  detail::expect_rank(operation, "dy", dy, 2);
  detail::expect_rank(operation, "w", w, 2);
  const std::int64_t tokens = dy.dim(0), in = w.dim(1), out = w.dim(0);
  detail::expect_tensor(operation, "dy", dy, dy.dtype(), {tokens, out});
  detail::expect_tensor(operation, "w", w, dy.dtype(), {out, in});
  detail::expect_tensor(operation, "dx", dx, dy.dtype(), {tokens, in});
  multiply(operation, context, {.out = dx, .a = dy, .b = w});
}

void linear_backward_weight(const Context& context, TensorView dw, ConstTensorView dy, ConstTensorView x,
                            bool accumulate) {
  constexpr const char* operation = "linear_backward_weight";
  detail::expect_rank(operation, "dy", dy, 2);
  detail::expect_rank(operation, "x", x, 2);
  const std::int64_t tokens = dy.dim(0), in = x.dim(1), out = dy.dim(1);
  detail::expect_tensor(operation, "dy", dy, dy.dtype(), {tokens, out});
  detail::expect_tensor(operation, "x", x, dy.dtype(), {tokens, in});
  detail::expect_tensor(operation, "dw", dw, accumulator_of(dy.dtype()), {out, in});
  multiply(operation, context,
           {.out = dw,
            .a = dy,
            .b = x,
            .a_transposed = true,
            .addend = accumulate ? ConstTensorView(dw) : ConstTensorView()});
}

std::size_t linear_workspace(DType compute) {
  return detail::gemm_workspace(compute);
}

}  // namespace layerstream::ops
