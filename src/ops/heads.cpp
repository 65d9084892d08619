#include "ops/heads.hpp"

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#if defined(KOKKOS_ENABLE_CUDA)
#include "ops/cuda/head_transform.hpp"
#else
#include "ops/detail/head_transform.hpp"
#endif

namespace layerstream::ops {
namespace {

using detail::HeadParts;
using detail::MathOf;

void expect_columns(const char* operation, const char* name, const ConstTensorView& view, HeadColumns columns,
                    std::int64_t tokens, std::int64_t width, DType compute) {
  detail::expect_tensor(operation, name, view, compute, {tokens, columns.row_stride});
  LAYERSTREAM_EXPECT(columns.first_column >= 0 && columns.first_column + width <= columns.row_stride,
                     "{}: columns [{}, {}) of {} rows of {}", operation, columns.first_column,
                     columns.first_column + width, name, columns.row_stride);
}

void expect_transform(const char* operation, const HeadTransform& transform, std::int64_t tokens,
                      std::int64_t heads, std::int64_t head_dim, DType accumulator) {
  if (transform.bias) {
    detail::expect_tensor(operation, "bias", transform.bias, accumulator, {heads * head_dim});
  }
  if (transform.norm_weight) {
    detail::expect_tensor(operation, "norm_weight", transform.norm_weight, accumulator, {head_dim});
  }
  const bool rope = static_cast<bool>(transform.positions);
  LAYERSTREAM_EXPECT(static_cast<bool>(transform.cos) == rope && static_cast<bool>(transform.sin) == rope,
                     "{}: cos, sin and positions come together or not at all", operation);
  if (!rope) return;
  LAYERSTREAM_EXPECT(head_dim % 2 == 0, "{}: rope needs an even head size, not {}", operation, head_dim);
  detail::expect_rank(operation, "cos", transform.cos, 2);
  detail::expect_tensor(operation, "cos", transform.cos, accumulator, {transform.cos.dim(0), head_dim / 2});
  detail::expect_tensor(operation, "sin", transform.sin, accumulator, transform.cos.shape());
  detail::expect_tensor(operation, "positions", transform.positions, DType::i32, {tokens});
}

template <class T>
HeadParts<T> parts_of(const HeadTransform& transform) {
  using A = MathOf<T>;
  const auto pointer = [](const ConstTensorView& view) { return view ? view.as<A>() : nullptr; };
  return {pointer(transform.bias),
          pointer(transform.norm_weight),
          pointer(transform.cos),
          pointer(transform.sin),
          transform.positions ? transform.positions.as<std::int32_t>() : nullptr,
          static_cast<A>(transform.norm_eps)};
}

template <class T, class D>
void launch_backward(const Context& context, const HeadTransformBackward& args,
                     const HeadTransform& transform) {
  using A = MathOf<T>;
  constexpr const char* operation = "head_transform_backward";
  const std::int64_t tokens = args.dout.dim(0), heads = args.dout.dim(1), head_dim = args.dout.dim(2);
  const std::int64_t partials = detail::head_partial_rows(tokens) * heads * head_dim;
  A* workspace = detail::workspace_as<A>(
      operation, context, head_transform_backward_workspace(tokens, heads, head_dim, args.draw.dtype()));
  detail::run_head_backward(
      detail::execution_space(context),
      detail::HeadBackward<T, D>{
          .draw = args.draw.as<T>() + args.draw_columns.first_column,
          .dout = args.dout.as<D>(),
          .raw = transform.norm_weight ? args.raw.as<T>() + args.raw_columns.first_column : nullptr,
          .draw_stride = args.draw_columns.row_stride,
          .raw_stride = args.raw_columns.row_stride,
          .tokens = tokens,
          .heads = heads,
          .head_dim = head_dim,
          .parts = parts_of<T>(transform),
          .dbias = transform.bias ? args.dbias.as<A>() : nullptr,
          .dnorm_weight = transform.norm_weight ? args.dnorm_weight.as<A>() : nullptr,
          .bias_partials = transform.bias ? workspace : nullptr,
          .norm_partials = transform.norm_weight ? workspace + partials : nullptr});
}

}  // namespace

void head_transform_forward(const Context& context, TensorView out, ConstTensorView raw, HeadColumns columns,
                            const HeadTransform& transform) {
  constexpr const char* operation = "head_transform_forward";
  detail::expect_rank(operation, "out", out, 3);
  const std::int64_t tokens = out.dim(0), heads = out.dim(1), head_dim = out.dim(2);
  const DType compute = out.dtype();
  detail::expect_tensor(operation, "out", out, compute, out.shape());
  expect_columns(operation, "raw", raw, columns, tokens, heads * head_dim, compute);
  expect_transform(operation, transform, tokens, heads, head_dim, accumulator_of(compute));
  detail::dispatch_compute(compute, operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::run_head_forward(
        detail::execution_space(context), "layerstream::head_transform_forward",
        detail::HeadForward<T>{out.as<T>(), raw.as<T>() + columns.first_column, columns.row_stride, tokens,
                               heads, head_dim, parts_of<T>(transform)});
  });
}

void head_transform_backward(const Context& context, const HeadTransformBackward& args,
                             const HeadTransform& transform) {
  constexpr const char* operation = "head_transform_backward";
  detail::expect_rank(operation, "dout", args.dout, 3);
  const std::int64_t tokens = args.dout.dim(0), heads = args.dout.dim(1), head_dim = args.dout.dim(2);
  const std::int64_t width = heads * head_dim;
  const DType compute = args.draw.dtype(), accumulator = accumulator_of(compute);
  const bool dout_is_compute = args.dout.dtype() == compute;
  detail::expect_tensor(operation, "dout", args.dout, dout_is_compute ? compute : accumulator,
                        args.dout.shape());
  expect_columns(operation, "draw", args.draw, args.draw_columns, tokens, width, compute);
  expect_transform(operation, transform, tokens, heads, head_dim, accumulator);
  LAYERSTREAM_EXPECT(static_cast<bool>(args.dbias) == static_cast<bool>(transform.bias),
                     "{}: dbias goes with bias", operation);
  LAYERSTREAM_EXPECT(static_cast<bool>(args.dnorm_weight) == static_cast<bool>(transform.norm_weight),
                     "{}: dnorm_weight goes with norm_weight", operation);
  if (transform.bias) detail::expect_tensor(operation, "dbias", args.dbias, accumulator, {width});
  if (transform.norm_weight) {
    detail::expect_tensor(operation, "dnorm_weight", args.dnorm_weight, accumulator, {head_dim});
    expect_columns(operation, "raw", args.raw, args.raw_columns, tokens, width, compute);
  }
  detail::dispatch_compute(compute, operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if (dout_is_compute) {
      launch_backward<T, T>(context, args, transform);
    } else {
      launch_backward<T, MathOf<T>>(context, args, transform);
    }
  });
}

std::size_t head_transform_backward_workspace(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                                              DType compute) {
  return static_cast<std::size_t>(2 * detail::head_partial_rows(tokens) * heads * head_dim) *
         size_of(accumulator_of(compute));
}

}  // namespace layerstream::ops
