#include "ops/heads.hpp"

#include <algorithm>
#include <array>

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
  constexpr std::int64_t most_angles = std::int64_t{1} << 32;
  LAYERSTREAM_EXPECT(transform.cos.numel() <= most_angles, "{}: {} angles of the rope; at most {}", operation,
                     transform.cos.numel(), most_angles);
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

template <class T>
detail::HeadForward<T> forward_group(const HeadTransformForward& group) {
  return {.out = group.out.as<T>(),
          .raw = group.raw.as<T>() + group.columns.first_column,
          .row_stride = group.columns.row_stride,
          .tokens = group.out.dim(0),
          .heads = group.out.dim(1),
          .head_dim = group.out.dim(2),
          .parts = parts_of<T>(group.transform)};
}

template <class T>
detail::HeadBackward<T> backward_group(const HeadGroupBackward& group) {
  using A = MathOf<T>;
  const auto& [args, transform] = group;
  const bool is_wide = args.dout.dtype() != args.draw.dtype();
  return {.draw = args.draw.as<T>() + args.draw_columns.first_column,
          .dout = args.dout.data(),
          .raw = transform.norm_weight ? args.raw.as<T>() + args.raw_columns.first_column : nullptr,
          .has_wide_dout = is_wide,
          .draw_stride = args.draw_columns.row_stride,
          .raw_stride = args.raw_columns.row_stride,
          .tokens = args.dout.dim(0),
          .heads = args.dout.dim(1),
          .head_dim = args.dout.dim(2),
          .parts = parts_of<T>(transform),
          .dbias = transform.bias ? args.dbias.as<A>() : nullptr,
          .dnorm_weight = transform.norm_weight ? args.dnorm_weight.as<A>() : nullptr};
}

void expect_groups(const char* operation, std::size_t count) {
  LAYERSTREAM_EXPECT(count >= 1 && count <= most_head_groups, "{}: {} groups of heads; a call takes 1 to {}",
                     operation, count, most_head_groups);
}

/// @param first the first group's T and compute dtype.
void expect_like_first(const char* operation, std::int64_t tokens, DType compute, std::int64_t first_tokens,
                       DType first_compute) {
  LAYERSTREAM_EXPECT(tokens == first_tokens && compute == first_compute,
                     "{}: groups of one call have the same tokens and dtype, not {} of {} and {} of {}",
                     operation, first_tokens, name_of(first_compute), tokens, name_of(compute));
}

void expect_forward(const char* operation, const HeadTransformForward& group) {
  const TensorView& out = group.out;
  detail::expect_rank(operation, "out", out, 3);
  const std::int64_t tokens = out.dim(0), heads = out.dim(1), head_dim = out.dim(2);
  const DType compute = out.dtype();
  detail::expect_tensor(operation, "out", out, compute, out.shape());
  expect_columns(operation, "raw", group.raw, group.columns, tokens, heads * head_dim, compute);
  expect_transform(operation, group.transform, tokens, heads, head_dim, accumulator_of(compute));
}

void expect_backward(const char* operation, const HeadGroupBackward& group) {
  const auto& [args, transform] = group;
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
}

}  // namespace

void head_transform_forward(const Context& context, std::span<const HeadTransformForward> groups) {
  constexpr const char* operation = "head_transform_forward";
  expect_groups(operation, groups.size());
  const DType compute = groups[0].out.dtype();
  for (const HeadTransformForward& group : groups) {
    expect_forward(operation, group);
    expect_like_first(operation, group.out.dim(0), group.out.dtype(), groups[0].out.dim(0), compute);
  }
  detail::dispatch_compute(compute, operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    std::array<detail::HeadForward<T>, most_head_groups> args{};
    std::transform(groups.begin(), groups.end(), args.begin(), forward_group<T>);
    detail::run_head_forward<T>(detail::execution_space(context), std::span(args).first(groups.size()));
  });
}

void head_transform_forward(const Context& context, TensorView out, ConstTensorView raw, HeadColumns columns,
                            const HeadTransform& transform) {
  const HeadTransformForward group{out, raw, columns, transform};
  head_transform_forward(context, std::span(&group, 1));
}

void head_transform_backward(const Context& context, std::span<const HeadGroupBackward> groups) {
  constexpr const char* operation = "head_transform_backward";
  expect_groups(operation, groups.size());
  const DType compute = groups[0].args.draw.dtype();
  std::size_t workspace = 0;
  for (const HeadGroupBackward& group : groups) {
    expect_backward(operation, group);
    const ConstTensorView dout = group.args.dout;
    expect_like_first(operation, dout.dim(0), group.args.draw.dtype(), groups[0].args.dout.dim(0), compute);
    workspace = std::max(workspace,
                         head_transform_backward_workspace(dout.dim(0), dout.dim(1), dout.dim(2), compute));
  }
  detail::dispatch_compute(compute, operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    std::array<detail::HeadBackward<T>, most_head_groups> args{};
    std::transform(groups.begin(), groups.end(), args.begin(), backward_group<T>);
    detail::run_head_backward<T>(detail::execution_space(context), std::span(args).first(groups.size()),
                                 detail::workspace_as<MathOf<T>>(operation, context, workspace));
  });
}

void head_transform_backward(const Context& context, const HeadTransformBackward& args,
                             const HeadTransform& transform) {
  const HeadGroupBackward group{args, transform};
  head_transform_backward(context, std::span(&group, 1));
}

std::size_t head_transform_backward_workspace(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                                              DType compute) {
  return static_cast<std::size_t>(2 * detail::head_partial_rows(tokens) * heads * head_dim) *
         size_of(accumulator_of(compute));
}

}  // namespace layerstream::ops
