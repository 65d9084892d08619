#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#include "ops/detail/partials.hpp"
#include "ops/linear.hpp"

namespace layerstream::ops {
namespace {

using detail::lane_width;
using detail::load_piece;
using detail::load_stored;
using detail::MathOf;
using detail::Piece;
using detail::store_piece;
using detail::Values;
using detail::whole_pieces;
using detail::widened;

#if defined(KOKKOS_ENABLE_CUDA)
/// One team for some rows of a tile of columns: the bias is read once, and all rows are under way together.
template <class T>
struct AddBiasTile {
  static constexpr int width = lane_width<T>;
  static constexpr int lanes = 64, rows_at_once = 4;
  static constexpr int tile = lanes * width;  // columns
  T* y;                                       // (T, N)
  const MathOf<T>* bias;                      // (N)
  std::int64_t rows, columns, tiles;

  template <class Team>
  KOKKOS_FUNCTION void operator()(const Team& team, std::int64_t index) const {
    const std::int64_t first = index % tiles * tile + team.lane * width, row = index / tiles * rows_at_once;
    const Piece<width, Team::whole> piece{first, columns - first};
    if (piece.available <= 0) return;
    Values<T, width> values[rows_at_once];
    LAYERSTREAM_UNROLL
    for (int i = 0; i < rows_at_once; ++i) {
      if (row + i < rows) values[i] = load_stored(piece, y + (row + i) * columns);
    }
    const auto addend = load_piece(piece, bias);
    LAYERSTREAM_UNROLL
    for (int i = 0; i < rows_at_once; ++i) {
      if (row + i >= rows) continue;
      auto sum = widened(values[i]);
      for (int k = 0; k < width; ++k) sum.at[k] += addend.at[k];
      store_piece(piece, y + (row + i) * columns, sum);
    }
  }
};

template <class T>
void run_add_bias(const detail::ExecutionSpace& space, const char* label, T* y, const MathOf<T>* bias,
                  std::int64_t rows, std::int64_t columns) {
  using Body = AddBiasTile<T>;
  const std::int64_t tiles = (columns + Body::tile - 1) / Body::tile;
  const std::int64_t groups = (rows + Body::rows_at_once - 1) / Body::rows_at_once;
  detail::for_each_row(space, label, groups * tiles, Body{y, bias, rows, columns, tiles},
                       {.whole = whole_pieces(lane_width<T>, {columns}, {y, bias}), .lanes = Body::lanes});
}
#else
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

template <class T>
void run_add_bias(const detail::ExecutionSpace& space, const char* label, T* y, const MathOf<T>* bias,
                  std::int64_t rows, std::int64_t columns) {
  detail::for_each_row(space, label, rows, AddBiasRow<T>{y, bias, columns});
}
#endif

}  // namespace

void add_bias(const Context& context, TensorView y, ConstTensorView bias) {
  constexpr const char* operation = "add_bias";
  detail::expect_rank(operation, "y", y, 2);
  detail::expect_tensor(operation, "y", y, y.dtype(), y.shape());
  detail::expect_tensor(operation, "bias", bias, accumulator_of(y.dtype()), {y.dim(1)});
  detail::dispatch_compute(y.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    run_add_bias(detail::execution_space(context), "layerstream::add_bias", y.as<T>(), bias.as<MathOf<T>>(),
                 y.dim(0), y.dim(1));
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
