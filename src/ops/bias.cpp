#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#include "ops/detail/partials.hpp"
#include "ops/linear.hpp"

namespace layerstream::ops {
namespace {

using detail::lane_width;
using detail::load_piece;
using detail::MathOf;
using detail::store_piece;

template <class T>
struct AddBiasRow {
  T* y;                   // (T, N)
  const MathOf<T>* bias;  // (N)
  std::int64_t columns;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    T* values = y + row * columns;
    const MathOf<T>* addends = bias;
    group.template for_each_piece<lane_width<T>>(columns, [=](auto piece) {
      auto sum = load_piece(piece, values);
      const auto addend = load_piece(piece, addends);
      for (int k = 0; k < piece.width; ++k) sum.at[k] += addend.at[k];
      store_piece(piece, values, sum);
    });
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
    detail::for_each_row(detail::execution_space(context), "layerstream::add_bias", y.dim(0),
                         AddBiasRow<T>{y.as<T>(), bias.as<MathOf<T>>(), y.dim(1)},
                         {.whole = detail::whole_pieces(lane_width<T>, {y.dim(1)}, {y.data(), bias.data()})});
  });
}

void bias_backward(const Context& context, TensorView dbias, ConstTensorView dy) {
  constexpr const char* operation = "bias_backward";
  detail::expect_rank(operation, "dy", dy, 2);
  detail::expect_tensor(operation, "dy", dy, dy.dtype(), dy.shape());
  detail::expect_tensor(operation, "dbias", dbias, accumulator_of(dy.dtype()), {dy.dim(1)});
  detail::dispatch_compute(dy.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::add_column_sums(detail::execution_space(context), "layerstream::bias_backward",
                            dbias.as<MathOf<T>>(), dy.as<T>(), dy.dim(0), dy.dim(1));
  });
}

}  // namespace layerstream::ops
