#include "ops/elementwise.hpp"

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"
#if defined(KOKKOS_ENABLE_CUDA)
#include "core/cuda_error.hpp"
#endif

namespace layerstream::ops {
namespace {

using detail::lane_width;
using detail::load_piece;
using detail::load_stored;
using detail::MathOf;
using detail::store_piece;
using detail::Values;
using detail::whole_pieces;

template <class T>
struct Add {
  static constexpr int width = lane_width<T>;
  T* out;
  const T* a;
  const T* b;

  template <class Piece>
  KOKKOS_FORCEINLINE_FUNCTION void operator()(const Piece& piece) const {
    auto sum = load_piece(piece, a);
    const auto addend = load_piece(piece, b);
    for (int k = 0; k < Piece::width; ++k) sum.at[k] += addend.at[k];
    store_piece(piece, out, sum);
  }
};

template <class A>
KOKKOS_INLINE_FUNCTION A sigmoid(A z) {
  return A(1) / (A(1) + Kokkos::exp(-z));
}

template <class T>
struct SwigluRow {
  T* act;            // (T, F)
  const T* gate_up;  // (T, 2F)
  std::int64_t columns;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const T* gate = gate_up + 2 * row * columns;
    const T* up = gate + columns;
    T* out = act + row * columns;
    group.template for_each_piece<lane_width<T>>(columns, [=](auto piece) {
      auto z = load_piece(piece, gate);
      const auto factor = load_piece(piece, up);
      for (int k = 0; k < piece.width; ++k) z.at[k] = z.at[k] * sigmoid(z.at[k]) * factor.at[k];
      store_piece(piece, out, z);
    });
  }
};

/// With s = sigmoid(gate): dup = dact · gate · s, dgate = dact · up · s · (1 + gate · (1 − s)).
template <class T>
struct SwigluBackwardRow {
  using A = MathOf<T>;
  T* dgate_up;       // (T, 2F)
  T* act;            // (T, F) or nullptr
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
    T* out = act == nullptr ? nullptr : act + row * columns;
    group.template for_each_piece<lane_width<T>>(columns, [=](auto piece) {
      auto gates = load_piece(piece, gate), ups = load_piece(piece, up);
      auto grads = load_piece(piece, grad);
      for (int k = 0; k < piece.width; ++k) {
        const A z = gates.at[k], u = ups.at[k], g = grads.at[k];
        const A s = sigmoid(z);
        gates.at[k] = g * u * s * (A(1) + z * (A(1) - s));
        ups.at[k] = g * (z * s);
        grads.at[k] = z * s * u;
      }
      store_piece(piece, dgate, gates);
      store_piece(piece, dup, ups);
      if (out != nullptr) store_piece(piece, out, grads);
    });
  }
};

struct MergeHalves {
  static constexpr int width = lane_width<bf16>;
  float* out;
  const bf16* hi;
  const std::int16_t* lo;

  template <class Piece>
  KOKKOS_FORCEINLINE_FUNCTION void operator()(const Piece& piece) const {
    const auto high = load_stored(piece, hi);
    const auto low = load_stored(piece, lo);
    Values<float, Piece::width> merged;
    for (int k = 0; k < Piece::width; ++k) merged.at[k] = merge(high.at[k], low.at[k]);
    store_piece(piece, out, merged);
  }
};

#if !defined(KOKKOS_ENABLE_CUDA)
struct FillZero {
  std::byte* out;
  template <class Piece>
  KOKKOS_FORCEINLINE_FUNCTION void operator()(const Piece& piece) const {
    out[piece.first] = std::byte{0};
  }
};
#endif

constexpr std::int64_t squares_tile = 16384;

constexpr std::int64_t squares_tiles(std::int64_t elements) {
  return (elements + squares_tile - 1) / squares_tile;
}

struct SquaresOfTile {
  static constexpr int most_lanes = 256;
  double* partials;
  const float* x;
  std::int64_t elements;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t tile) const {
    const std::int64_t begin = tile * squares_tile;
    const std::int64_t count = elements - begin < squares_tile ? elements - begin : squares_tile;
    const float* values = x + begin;
    const double sum = group.template sum_pieces<double, lane_width<float>>(count, [=](auto piece) {
      const auto terms = load_piece(piece, values);
      double squares = static_cast<double>(terms.at[0]) * static_cast<double>(terms.at[0]);
      for (int k = 1; k < piece.width; ++k) {
        squares += static_cast<double>(terms.at[k]) * static_cast<double>(terms.at[k]);
      }
      return squares;
    });
    if (group.is_leader()) partials[tile] = sum;
  }
};

struct SumOfPartials {
  static constexpr int most_lanes = 1024;
  double* result;
  const double* partials;
  std::int64_t count;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t) const {
    const double* values = partials;
    const double sum = group.template sum_pieces<double, lane_width<double>>(count, [=](auto piece) {
      const auto terms = load_piece(piece, values);
      double total = terms.at[0];
      for (int k = 1; k < piece.width; ++k) total += terms.at[k];
      return total;
    });
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
    detail::for_each_piece(detail::execution_space(context), "layerstream::add", out.numel(),
                           whole_pieces(lane_width<T>, {}, {out.data(), a.data(), b.data()}),
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
    detail::for_each_row(detail::execution_space(context), "layerstream::swiglu_forward", tokens,
                         SwigluRow<T>{act.as<T>(), gate_up.as<T>(), columns},
                         {.whole = whole_pieces(lane_width<T>, {columns}, {act.data(), gate_up.data()})});
  });
}

void swiglu_backward(const Context& context, TensorView dgate_up, ConstTensorView dact,
                     ConstTensorView gate_up, TensorView act) {
  constexpr const char* operation = "swiglu_backward";
  detail::expect_rank(operation, "dact", dact, 2);
  const std::int64_t tokens = dact.dim(0), columns = dact.dim(1);
  detail::expect_tensor(operation, "dact", dact, dact.dtype(), dact.shape());
  detail::expect_tensor(operation, "gate_up", gate_up, dact.dtype(), {tokens, 2 * columns});
  detail::expect_tensor(operation, "dgate_up", dgate_up, dact.dtype(), {tokens, 2 * columns});
  if (act) detail::expect_tensor(operation, "act", act, dact.dtype(), dact.shape());
  detail::dispatch_compute(dact.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::for_each_row(detail::execution_space(context), "layerstream::swiglu_backward", tokens,
                         SwigluBackwardRow<T>{dgate_up.as<T>(), act ? act.as<T>() : nullptr, dact.as<T>(),
                                              gate_up.as<T>(), columns},
                         {.whole = whole_pieces(lane_width<T>, {columns},
                                                {dgate_up.data(), dact.data(), gate_up.data(), act.data()})});
  });
}

void merge_halves(const Context& context, TensorView out, ConstTensorView hi, ConstTensorView lo) {
  constexpr const char* operation = "merge_halves";
  detail::expect_tensor(operation, "out", out, DType::f32, out.shape());
  detail::expect_tensor(operation, "hi", hi, DType::bf16, out.shape());
  detail::expect_tensor(operation, "lo", lo, DType::i16, out.shape());
  detail::for_each_piece(detail::execution_space(context), "layerstream::merge_halves", out.numel(),
                         whole_pieces(MergeHalves::width, {}, {out.data(), hi.data(), lo.data()}),
                         MergeHalves{out.as<float>(), hi.as<bf16>(), lo.as<std::int16_t>()});
}

void fill_zero(const Context& context, TensorView out) {
  detail::expect_tensor("fill_zero", "out", out, out.dtype(), out.shape());
  const std::int64_t bytes = out.numel() * static_cast<std::int64_t>(size_of(out.dtype()));
  if (bytes == 0) return;
  const auto& space = detail::execution_space(context);
#if defined(KOKKOS_ENABLE_CUDA)
  LAYERSTREAM_CUDA(cudaMemsetAsync(out.data(), 0, static_cast<std::size_t>(bytes), space.cuda_stream()));
#else
  detail::for_each_piece(space, "layerstream::fill_zero", bytes, false,
                         FillZero{static_cast<std::byte*>(out.data())});
#endif
}

void sum_of_squares(const Context& context, double* result, ConstTensorView x) {
  constexpr const char* operation = "sum_of_squares";
  detail::expect_tensor(operation, "x", x, DType::f32, x.shape());
  LAYERSTREAM_EXPECT(result != nullptr, "{}: nowhere to put the result", operation);
  const std::int64_t elements = x.numel(), tiles = squares_tiles(elements);
  double* partials = detail::workspace_as<double>(operation, context, sum_of_squares_workspace(elements));
  const auto& space = detail::execution_space(context);
  detail::for_each_row(space, "layerstream::sum_of_squares", tiles,
                       SquaresOfTile{partials, x.as<float>(), elements},
                       {.whole = whole_pieces(lane_width<float>, {elements}, {x.data()}), .lanes = 256});
  detail::for_each_row(space, "layerstream::sum_of_squares_total", 1, SumOfPartials{result, partials, tiles},
                       {.whole = whole_pieces(lane_width<double>, {tiles}, {partials}), .lanes = 1024});
}

std::size_t sum_of_squares_workspace(std::int64_t elements) {
  return static_cast<std::size_t>(squares_tiles(elements)) * sizeof(double);
}

}  // namespace layerstream::ops
