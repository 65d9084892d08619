#include "ops/elementwise.hpp"

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"

namespace layerstream::ops {
namespace {

using detail::load;
using detail::MathOf;
using detail::store_as;

template <class T>
struct Add {
  T* out;
  const T* a;
  const T* b;
  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t i) const {
    out[i] = store_as<T>(load(a[i]) + load(b[i]));
  }
};

template <class A>
KOKKOS_INLINE_FUNCTION A sigmoid(A z) {
  return A(1) / (A(1) + Kokkos::exp(-z));
}

template <class T>
struct SwigluRow {
  using A = MathOf<T>;
  T* act;            // (T, F)
  const T* gate_up;  // (T, 2F)
  std::int64_t columns;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const T* gate = gate_up + 2 * row * columns;
    const T* up = gate + columns;
    T* out = act + row * columns;
    group.for_each(columns, [=](std::int64_t i) {
      const A z = load(gate[i]);
      out[i] = store_as<T>(z * sigmoid(z) * load(up[i]));
    });
  }
};

/// With s = sigmoid(gate): dup = dact · gate · s, dgate = dact · up · s · (1 + gate · (1 − s)).
template <class T>
struct SwigluBackwardRow {
  using A = MathOf<T>;
  T* dgate_up;       // (T, 2F)
  const T* dact;     // (T, F)
  const T* gate_up;  // (T, 2F)
  std::int64_t columns;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const T* gate = gate_up + 2 * row * columns;
    const T* up = gate + columns;
    const T* grad = dact + row * columns;
    T* dgate = dgate_up + 2 * row * columns;
    T* dup = dgate + columns;
    group.for_each(columns, [=](std::int64_t i) {
      const A z = load(gate[i]), u = load(up[i]), g = load(grad[i]);
      const A s = sigmoid(z);
      dgate[i] = store_as<T>(g * u * s * (A(1) + z * (A(1) - s)));
      dup[i] = store_as<T>(g * (z * s));
    });
  }
};

struct MergeHalves {
  float* out;
  const bf16* hi;
  const std::int16_t* lo;
  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t i) const { out[i] = merge(hi[i], lo[i]); }
};

template <class Word>
struct FillZero {
  Word* out;
  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t i) const { out[i] = Word(0); }
};

constexpr std::int64_t squares_tile = 16384;

constexpr std::int64_t squares_tiles(std::int64_t elements) {
  return (elements + squares_tile - 1) / squares_tile;
}

struct SquaresOfTile {
  double* partials;
  const float* x;
  std::int64_t elements;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t tile) const {
    const std::int64_t begin = tile * squares_tile;
    const std::int64_t count = elements - begin < squares_tile ? elements - begin : squares_tile;
    const float* values = x + begin;
    const double sum = group.template sum<double>(count, [=](std::int64_t i) {
      const double value = values[i];
      return value * value;
    });
    if (group.is_leader()) partials[tile] = sum;
  }
};

struct SumOfPartials {
  double* result;
  const double* partials;
  std::int64_t count;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t) const {
    const double* values = partials;
    const double sum = group.template sum<double>(count, [=](std::int64_t i) { return values[i]; });
    if (group.is_leader()) *result = sum;
  }
};

}  // namespace

void add(const Context& context, TensorView out, ConstTensorView a, ConstTensorView b) {
  constexpr const char* operation = "add";
  detail::expect_tensor(operation, "a", a, out.dtype(), out.shape());
  detail::expect_tensor(operation, "b", b, out.dtype(), out.shape());
  detail::expect_tensor(operation, "out", out, out.dtype(), out.shape());
  detail::dispatch_compute(out.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::for_each_element(detail::execution_space(context.stream), "layerstream::add", out.numel(),
                             Add<T>{out.as<T>(), a.as<T>(), b.as<T>()});
  });
}

void swiglu_forward(const Context& context, TensorView act, ConstTensorView gate_up) {
  constexpr const char* operation = "swiglu_forward";
  detail::expect_rank(operation, "act", act, 2);
  const std::int64_t tokens = act.dim(0), columns = act.dim(1);
  detail::expect_tensor(operation, "act", act, act.dtype(), act.shape());
  detail::expect_tensor(operation, "gate_up", gate_up, act.dtype(), {tokens, 2 * columns});
  detail::dispatch_compute(act.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::for_each_row(detail::execution_space(context.stream), "layerstream::swiglu_forward", tokens,
                         SwigluRow<T>{act.as<T>(), gate_up.as<T>(), columns});
  });
}

void swiglu_backward(const Context& context, TensorView dgate_up, ConstTensorView dact,
                     ConstTensorView gate_up) {
  constexpr const char* operation = "swiglu_backward";
  detail::expect_rank(operation, "dact", dact, 2);
  const std::int64_t tokens = dact.dim(0), columns = dact.dim(1);
  detail::expect_tensor(operation, "dact", dact, dact.dtype(), dact.shape());
  detail::expect_tensor(operation, "gate_up", gate_up, dact.dtype(), {tokens, 2 * columns});
  detail::expect_tensor(operation, "dgate_up", dgate_up, dact.dtype(), {tokens, 2 * columns});
  detail::dispatch_compute(dact.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::for_each_row(detail::execution_space(context.stream), "layerstream::swiglu_backward", tokens,
                         SwigluBackwardRow<T>{dgate_up.as<T>(), dact.as<T>(), gate_up.as<T>(), columns});
  });
}

void merge_halves(const Context& context, TensorView out, ConstTensorView hi, ConstTensorView lo) {
  constexpr const char* operation = "merge_halves";
  detail::expect_tensor(operation, "out", out, DType::f32, out.shape());
  detail::expect_tensor(operation, "hi", hi, DType::bf16, out.shape());
  detail::expect_tensor(operation, "lo", lo, DType::i16, out.shape());
  detail::for_each_element(detail::execution_space(context.stream), "layerstream::merge_halves", out.numel(),
                           MergeHalves{out.as<float>(), hi.as<bf16>(), lo.as<std::int16_t>()});
}

void fill_zero(const Context& context, TensorView out) {
  detail::expect_tensor("fill_zero", "out", out, out.dtype(), out.shape());
  const auto space = detail::execution_space(context.stream);
  constexpr const char* label = "layerstream::fill_zero";
  switch (size_of(out.dtype())) {
    case 8:
      return detail::for_each_element(space, label, out.numel(),
                                      FillZero<std::uint64_t>{static_cast<std::uint64_t*>(out.data())});
    case 4:
      return detail::for_each_element(space, label, out.numel(),
                                      FillZero<std::uint32_t>{static_cast<std::uint32_t*>(out.data())});
    case 2:
      return detail::for_each_element(space, label, out.numel(),
                                      FillZero<std::uint16_t>{static_cast<std::uint16_t*>(out.data())});
    default:
      return detail::for_each_element(space, label, out.numel(),
                                      FillZero<std::uint8_t>{static_cast<std::uint8_t*>(out.data())});
  }
}

void sum_of_squares(const Context& context, double* result, ConstTensorView x) {
  constexpr const char* operation = "sum_of_squares";
  detail::expect_tensor(operation, "x", x, DType::f32, x.shape());
  LAYERSTREAM_EXPECT(result != nullptr, "{}: nowhere to put the result", operation);
  const std::int64_t elements = x.numel(), tiles = squares_tiles(elements);
  double* partials = detail::workspace_as<double>(operation, context, sum_of_squares_workspace(elements));
  const auto space = detail::execution_space(context.stream);
  detail::for_each_row(space, "layerstream::sum_of_squares", tiles,
                       SquaresOfTile{partials, x.as<float>(), elements});
  detail::for_each_row(space, "layerstream::sum_of_squares_total", 1, SumOfPartials{result, partials, tiles});
}

std::size_t sum_of_squares_workspace(std::int64_t elements) {
  return static_cast<std::size_t>(squares_tiles(elements)) * sizeof(double);
}

}  // namespace layerstream::ops
