#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#include "ops/linear.hpp"

namespace layerstream::ops {
namespace {

using detail::load;
using detail::MathOf;
using detail::store_as;

template <class T>
struct AddBiasRow {
  T* y;                   // (T, N)
  const MathOf<T>* bias;  // (N)
  std::int64_t columns;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    T* values = y + row * columns;
    const MathOf<T>* addend = bias;
    group.for_each(columns, [=](std::int64_t i) { values[i] = store_as<T>(load(values[i]) + addend[i]); });
  }
};

template <class T>
struct SumRows {
  using A = MathOf<T>;
  A* dbias;     // (N)
  const T* dy;  // (T, N)
  std::int64_t tokens, columns;

  KOKKOS_FUNCTION void operator()(std::int64_t begin, int count) const {
    A sum[detail::column_tile] = {};
    for (std::int64_t token = 0; token < tokens; ++token) {
      const T* values = dy + token * columns + begin;
      for (int c = 0; c < count; ++c) sum[c] += load(values[c]);
    }
    for (int c = 0; c < count; ++c) dbias[begin + c] += sum[c];
  }
};

}  // namespace

void add_bias(const Context& context, TensorView y, ConstTensorView bias) {
  constexpr const char* operation = "add_bias";
  detail::expect_rank(operation, "y", y, 2);
  detail::expect_tensor(operation, "y", y, y.dtype(), y.shape());
  detail::expect_tensor(operation, "bias", bias, accumulator_of(y.dtype()), {y.dim(1)});
  detail::dispatch_compute(y.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::for_each_row(detail::execution_space(context.stream), "layerstream::add_bias", y.dim(0),
                         AddBiasRow<T>{y.as<T>(), bias.as<MathOf<T>>(), y.dim(1)});
  });
}

void bias_backward(const Context& context, TensorView dbias, ConstTensorView dy) {
  constexpr const char* operation = "bias_backward";
  detail::expect_rank(operation, "dy", dy, 2);
  detail::expect_tensor(operation, "dy", dy, dy.dtype(), dy.shape());
  detail::expect_tensor(operation, "dbias", dbias, accumulator_of(dy.dtype()), {dy.dim(1)});
  detail::dispatch_compute(dy.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::for_each_column_tile(detail::execution_space(context.stream), "layerstream::bias_backward",
                                 dy.dim(1),
                                 SumRows<T>{dbias.as<MathOf<T>>(), dy.as<T>(), dy.dim(0), dy.dim(1)});
  });
}

}  // namespace layerstream::ops
