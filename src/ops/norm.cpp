#include "ops/norm.hpp"

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#include "ops/detail/partials.hpp"

namespace layerstream::ops {
namespace {

using detail::load;
using detail::MathOf;
using detail::rounded_to;
using detail::store_as;

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

template <class T>
struct RmsNormRow {
  using A = MathOf<T>;
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
    const A inverse = inverse_rms(group, in, hidden_size, eps);
    group.for_each(hidden_size, [=](std::int64_t i) {
      out[i] = store_as<T>(w[i] * rounded_to<T>(load(in[i]) * inverse));
    });
  }
};

/// With n = x / rms(x) and g = dy · weight: dx = (g − n · mean(g · n)) / rms(x), dweight = sum of dy · n
/// over rows, where n is the rounded value that met the weight in the forward pass.
template <class T>
struct RmsNormBackwardBlock {
  using A = MathOf<T>;
  T* dx;              // (T, H)
  const T* dy;        // (T, H)
  const T* x;         // (T, H)
  const T* residual;  // (T, H) or nullptr
  const A* weight;    // (H)
  A* partials;        // (blocks, H)
  std::int64_t tokens, hidden_size, rows_per_block;
  A eps;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t block) const {
    A* dweight = partials + block * hidden_size;
    group.for_each(hidden_size, [=](std::int64_t i) { dweight[i] = A(0); });
    const std::int64_t begin = block * rows_per_block;
    const std::int64_t end = begin + rows_per_block < tokens ? begin + rows_per_block : tokens;
    for (std::int64_t row = begin; row < end; ++row) backward_row(group, row, dweight);
  }

  template <class Group>
  KOKKOS_INLINE_FUNCTION void backward_row(const Group& group, std::int64_t row, A* dweight) const {
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
  }
};

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
    detail::for_each_row(
        detail::execution_space(context.stream), "layerstream::rms_norm_forward", tokens,
        RmsNormRow<T>{y.as<T>(), x.as<T>(), weight.as<A>(), hidden_size, static_cast<A>(eps)});
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
  detail::expect_tensor(operation, "weight", args.weight, accumulator, {hidden_size});
  detail::expect_tensor(operation, "dweight", args.dweight, accumulator, {hidden_size});
  detail::dispatch_compute(x.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using A = MathOf<T>;
    const auto space = detail::execution_space(context.stream);
    const detail::RowBlocks blocks = detail::row_blocks(tokens);
    A* partials = detail::workspace_as<A>(operation, context,
                                          rms_norm_backward_workspace(tokens, hidden_size, x.dtype()));
    const T* residual = args.residual ? args.residual.as<T>() : nullptr;
    detail::for_each_row(space, "layerstream::rms_norm_backward", blocks.count,
                         RmsNormBackwardBlock<T>{args.dx.as<T>(), args.dy.as<T>(), x.as<T>(), residual,
                                                 args.weight.as<A>(), partials, tokens, hidden_size,
                                                 blocks.rows_per_block, static_cast<A>(args.eps)});
    detail::add_column_sums(space, "layerstream::rms_norm_dweight", args.dweight.as<A>(), partials,
                            blocks.count, hidden_size);
  });
}

std::size_t rms_norm_backward_workspace(std::int64_t tokens, std::int64_t hidden_size, DType compute) {
  return static_cast<std::size_t>(detail::row_blocks(tokens).count * hidden_size) *
         size_of(accumulator_of(compute));
}

}  // namespace layerstream::ops
