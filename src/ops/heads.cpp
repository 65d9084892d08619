#include "ops/heads.hpp"

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#include "ops/detail/partials.hpp"

namespace layerstream::ops {
namespace {

using detail::load;
using detail::MathOf;
using detail::store_as;

/// The parts of a transform as pointers; nullptr leaves a part out.
template <class T>
struct HeadParts {
  using A = MathOf<T>;
  const A* bias;                  // (H, d)
  const A* norm_weight;           // (d)
  const A* cos;                   // (P, d / 2)
  const A* sin;                   // (P, d / 2)
  const std::int32_t* positions;  // (T)
  A eps;
};

/// raw[i] + bias[i] of one head.
template <class T>
struct BiasedHead {
  using A = MathOf<T>;
  const T* raw;   // (d)
  const A* bias;  // (d) or nullptr
  KOKKOS_INLINE_FUNCTION A operator()(std::int64_t i) const {
    const A value = load(raw[i]);
    return bias == nullptr ? value : value + bias[i];
  }
};

template <class T, class Group>
KOKKOS_INLINE_FUNCTION MathOf<T> inverse_rms(const Group& group, const BiasedHead<T>& head,
                                             std::int64_t head_dim, MathOf<T> eps) {
  using A = MathOf<T>;
  const A squares = group.template sum<A>(head_dim, [=](std::int64_t i) { return head(i) * head(i); });
  return A(1) / Kokkos::sqrt(squares / static_cast<A>(head_dim) + eps);
}

template <class T>
struct HeadTransformRow {
  using A = MathOf<T>;
  T* out;        // (T, H, d)
  const T* raw;  // (T, row_stride), from this group's first column
  std::int64_t row_stride, heads, head_dim;
  HeadParts<T> parts;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const std::int64_t token = row / heads, head = row % heads;
    const BiasedHead<T> value{raw + token * row_stride + head * head_dim,
                              parts.bias == nullptr ? nullptr : parts.bias + head * head_dim};
    T* result = out + row * head_dim;
    if (parts.norm_weight == nullptr) {
      rotate(group, token, result, value);
    } else {
      const A inverse = inverse_rms(group, value, head_dim, parts.eps);
      const A* weight = parts.norm_weight;
      rotate(group, token, result, [=](std::int64_t i) { return weight[i] * (value(i) * inverse); });
    }
  }

  template <class Group, class Value>
  KOKKOS_INLINE_FUNCTION void rotate(const Group& group, std::int64_t token, T* result,
                                     const Value& value) const {
    if (parts.positions == nullptr) {
      group.for_each(head_dim, [=](std::int64_t i) { result[i] = store_as<T>(value(i)); });
      return;
    }
    const std::int64_t half = head_dim / 2;
    const A* cos = parts.cos + parts.positions[token] * half;
    const A* sin = parts.sin + parts.positions[token] * half;
    group.for_each(half, [=](std::int64_t i) {
      const A first = value(i), second = value(i + half);
      result[i] = store_as<T>(first * cos[i] - second * sin[i]);
      result[i + half] = store_as<T>(second * cos[i] + first * sin[i]);
    });
  }
};

/// Backward of one head over a block of tokens. D is the dtype of dout.
template <class T, class D>
struct HeadTransformBackwardBlock {
  using A = MathOf<T>;
  T* draw;        // (T, draw_stride), from this group's first column
  const D* dout;  // (T, H, d)
  const T* raw;   // (T, raw_stride), from this group's first column; read only with a norm
  std::int64_t draw_stride, raw_stride, tokens, heads, head_dim, tokens_per_block;
  HeadParts<T> parts;
  A* bias_partials;  // (blocks, H, d) or nullptr
  A* norm_partials;  // (blocks, H, d) or nullptr

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const std::int64_t block = row / heads, head = row % heads;
    A* dbias = bias_partials == nullptr ? nullptr : bias_partials + row * head_dim;
    A* dweight = norm_partials == nullptr ? nullptr : norm_partials + row * head_dim;
    if (dbias != nullptr) group.for_each(head_dim, [=](std::int64_t i) { dbias[i] = A(0); });
    if (dweight != nullptr) group.for_each(head_dim, [=](std::int64_t i) { dweight[i] = A(0); });
    const std::int64_t begin = block * tokens_per_block;
    const std::int64_t end = begin + tokens_per_block < tokens ? begin + tokens_per_block : tokens;
    for (std::int64_t token = begin; token < end; ++token) {
      backward_token(group, token, head, dbias, dweight);
    }
  }

  template <class Group>
  KOKKOS_INLINE_FUNCTION void backward_token(const Group& group, std::int64_t token, std::int64_t head,
                                             A* dbias, A* dweight) const {
    const D* grad = dout + (token * heads + head) * head_dim;
    T* result = draw + token * draw_stride + head * head_dim;
    if (parts.positions == nullptr) {
      backward_norm(group, token, head, result, dbias, dweight,
                    [=](std::int64_t i) { return static_cast<A>(load(grad[i])); });
      return;
    }
    // The transpose of a rotation is the rotation by the opposite angle.
    const std::int64_t half = head_dim / 2;
    const A* cos = parts.cos + parts.positions[token] * half;
    const A* sin = parts.sin + parts.positions[token] * half;
    backward_norm(group, token, head, result, dbias, dweight, [=](std::int64_t i) {
      const bool lower = i < half;
      const std::int64_t angle = lower ? i : i - half;
      const A own = load(grad[i]), other = load(grad[lower ? i + half : i - half]);
      return lower ? own * cos[angle] + other * sin[angle] : own * cos[angle] - other * sin[angle];
    });
  }

  /// `grad(i)` is the gradient with respect to what entered the rope.
  template <class Group, class Gradient>
  KOKKOS_INLINE_FUNCTION void backward_norm(const Group& group, std::int64_t token, std::int64_t head,
                                            T* result, A* dbias, A* dweight, const Gradient& grad) const {
    if (parts.norm_weight == nullptr) {
      group.for_each(head_dim, [=](std::int64_t i) { write(result, dbias, i, grad(i)); });
      return;
    }
    const BiasedHead<T> value{raw + token * raw_stride + head * head_dim,
                              parts.bias == nullptr ? nullptr : parts.bias + head * head_dim};
    const A* weight = parts.norm_weight;
    const A inverse = inverse_rms(group, value, head_dim, parts.eps);
    const A dot = group.template sum<A>(
        head_dim, [=](std::int64_t i) { return grad(i) * weight[i] * (value(i) * inverse); });
    const A mean = dot / static_cast<A>(head_dim);
    group.for_each(head_dim, [=](std::int64_t i) {
      const A g = grad(i);
      const A normalised = value(i) * inverse;
      dweight[i] += g * normalised;
      write(result, dbias, i, inverse * (g * weight[i] - normalised * mean));
    });
  }

  KOKKOS_INLINE_FUNCTION static void write(T* result, A* dbias, std::int64_t i, A gradient) {
    result[i] = store_as<T>(gradient);
    if (dbias != nullptr) dbias[i] += gradient;
  }
};

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
  const std::int64_t columns = heads * head_dim;
  const detail::RowBlocks blocks = detail::row_blocks(tokens);
  A* workspace = detail::workspace_as<A>(
      operation, context, head_transform_backward_workspace(tokens, heads, head_dim, args.draw.dtype()));
  A* bias_partials = transform.bias ? workspace : nullptr;
  A* norm_partials = transform.norm_weight ? workspace + blocks.count * columns : nullptr;
  const T* raw = transform.norm_weight ? args.raw.as<T>() + args.raw_columns.first_column : nullptr;

  const auto space = detail::execution_space(context.stream);
  detail::for_each_row(space, "layerstream::head_transform_backward", blocks.count * heads,
                       HeadTransformBackwardBlock<T, D>{
                           args.draw.as<T>() + args.draw_columns.first_column, args.dout.as<D>(), raw,
                           args.draw_columns.row_stride, args.raw_columns.row_stride, tokens, heads, head_dim,
                           blocks.rows_per_block, parts_of<T>(transform), bias_partials, norm_partials});
  if (bias_partials != nullptr) {
    detail::add_column_sums(space, "layerstream::head_transform_dbias", args.dbias.as<A>(), bias_partials,
                            blocks.count, columns);
  }
  if (norm_partials != nullptr && blocks.count > 0) {
    // First the blocks of each head, into the first block's place; then the heads.
    detail::add_column_sums(space, "layerstream::head_transform_dnorm_heads", norm_partials,
                            norm_partials + columns, blocks.count - 1, columns);
    detail::add_column_sums(space, "layerstream::head_transform_dnorm", args.dnorm_weight.as<A>(),
                            norm_partials, heads, head_dim);
  }
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
    detail::for_each_row(detail::execution_space(context.stream), "layerstream::head_transform_forward",
                         tokens * heads,
                         HeadTransformRow<T>{out.as<T>(), raw.as<T>() + columns.first_column,
                                             columns.row_stride, heads, head_dim, parts_of<T>(transform)});
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
  return static_cast<std::size_t>(2 * detail::row_blocks(tokens).count * heads * head_dim) *
         size_of(accumulator_of(compute));
}

}  // namespace layerstream::ops
