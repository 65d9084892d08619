#include "ops/linear.hpp"

#include <gtest/gtest.h>

#include "tests/ops/ops_test.hpp"
#include "tests/support/finite_difference.hpp"

namespace layerstream::ops {
namespace {

using namespace layerstream::test;

/// The three products of one layer with inputs of one dtype.
struct Layer {
  OwnedTensor x, w, dy;  // (T, K), (N, K), (T, N)

  Layer(DType dtype, std::int64_t t, std::int64_t n, std::int64_t k)
      : x(normal_tensor(dtype, {t, k}, 1)),
        w(normal_tensor(dtype, {n, k}, 2)),
        dy(normal_tensor(dtype, {t, n}, 3)) {}
  Layer(OwnedTensor x_, OwnedTensor w_, OwnedTensor dy_)
      : x(std::move(x_)), w(std::move(w_)), dy(std::move(dy_)) {}

  Layer widened() const { return {x.to(DType::f64), w.to(DType::f64), dy.to(DType::f64)}; }
  Layer absolute() const { return {x.absolute(), w.absolute(), dy.absolute()}; }

  OwnedTensor forward(DType output) const {
    OwnedTensor y(output, dy.shape());
    Scratch scratch(linear_workspace(x.dtype()));
    linear_forward(scratch, y, x, w);
    return y;
  }
  OwnedTensor backward_input() const {
    OwnedTensor dx(x.dtype(), x.shape());
    Scratch scratch(linear_workspace(x.dtype()));
    linear_backward_input(scratch, dx, dy, w);
    return dx;
  }
  OwnedTensor backward_weight() const {
    OwnedTensor dw = constant_tensor(accumulator_of(x.dtype()), w.shape(), 0.0);
    Scratch scratch(linear_workspace(x.dtype()));
    linear_backward_weight(scratch, dw, dy, x);
    return dw;
  }
};

struct Sizes {
  std::int64_t t, n, k;
};
// One element, odd sizes, and more than one BLAS tile of 256 in both directions.
constexpr Sizes small_sizes[] = {{1, 1, 1}, {1, 3, 5}, {7, 5, 3}, {33, 17, 65}, {300, 270, 40}};

TEST(Linear, Fp64FollowsTheFormula) {
  for (const auto [t, n, k] : small_sizes) {
    const Layer layer(DType::f64, t, n, k);
    OwnedTensor y = constant_tensor(DType::f64, {t, n}, 0.0), dx = constant_tensor(DType::f64, {t, k}, 0.0);
    OwnedTensor dw = constant_tensor(DType::f64, {n, k}, 0.0);
    for (std::int64_t a = 0; a < t; ++a) {
      for (std::int64_t b = 0; b < n; ++b) {
        for (std::int64_t c = 0; c < k; ++c) {
          y.as<double>()[a * n + b] += layer.x[a * k + c] * layer.w[b * k + c];
          dx.as<double>()[a * k + c] += layer.dy[a * n + b] * layer.w[b * k + c];
          dw.as<double>()[b * k + c] += layer.dy[a * n + b] * layer.x[a * k + c];
        }
      }
    }
    // Two orders of sums of at most 300 products of numbers below 5: 2 · 300 · 2^-53 · 300 · 25, at worst.
    const auto bound = [](std::int64_t) { return 1e-12; };
    expect_within(layer.forward(DType::f64), y, bound);
    expect_within(layer.backward_input(), dx, bound);
    expect_within(layer.backward_weight(), dw, bound);
  }
}

TEST(Linear, BackwardIsTheDerivative) {
  Layer layer(DType::f64, 5, 4, 7);
  const auto objective = [&] { return dot(layer.forward(DType::f64), layer.dy); };
  // Linear in either argument: only rounding, 1e-16 · |f| / step.
  expect_gradient(layer.x, layer.backward_input(), objective, 1e-11);
  expect_gradient(layer.w, layer.backward_weight(), objective, 1e-11);
}

TEST(Linear, WeightGradientIsAddedToWhatIsThere) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Layer layer(dtype, 30, 9, 11);
    OwnedTensor dw = layer.backward_weight();
    const OwnedTensor once = dw;
    Scratch scratch(linear_workspace(dtype));
    linear_backward_weight(scratch, dw, layer.dy, layer.x);
    const double roundoff = dtype == DType::f64 ? 0x1p-53 : fp32_roundoff;
    const OwnedTensor magnitude = layer.widened().absolute().backward_weight();
    for (std::int64_t i = 0; i < dw.numel(); ++i) {
      ASSERT_NEAR(dw[i], 2.0 * once[i], 60.0 * roundoff * magnitude[i]);  // 60 terms in one order
    }
  }
}

/// Compares a layer in fp32 or bf16 with the same inputs in fp64. A sum of n products in FP32 is within
/// n · 2^-24 of the sum of magnitudes, whatever its order (Higham, 2002, 3.1).
void expect_within_roundings(const Layer& layer) {
  const Layer wide = layer.widened(), magnitude = wide.absolute();
  const double output = layer.x.dtype() == DType::bf16 ? bf16_roundoff : 0.0;
  const auto check = [&](const OwnedTensor& actual, const OwnedTensor& expected, const OwnedTensor& sizes,
                         std::int64_t terms, double rounding) {
    const double sums = 1.01 * static_cast<double>(terms) * fp32_roundoff;
    expect_within(actual, expected, [&](std::int64_t i) {
      return 1.01 * rounding * std::fabs(expected[i]) + (1.0 + rounding) * sums * sizes[i];
    });
  };
  const std::int64_t t = layer.x.shape()[0], n = layer.w.shape()[0], k = layer.x.shape()[1];
  const OwnedTensor y = wide.forward(DType::f64), y_magnitude = magnitude.forward(DType::f64);
  check(layer.forward(layer.x.dtype()), y, y_magnitude, k, output);
  check(layer.forward(DType::f32), y, y_magnitude, k, 0.0);
  check(layer.backward_input(), wide.backward_input(), magnitude.backward_input(), n, output);
  check(layer.backward_weight(), wide.backward_weight(), magnitude.backward_weight(), t, 0.0);
}

TEST(Linear, LowerPrecisionStaysWithinItsRoundings) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto [t, n, k] : small_sizes) expect_within_roundings(Layer(dtype, t, n, k));
  }
}

// Larger than a panel of the bf16 scheme (1024 x 1024, 2048 deep) in each direction in turn.
TEST(Linear, Bf16ProductsLargerThanAPanelAreWhole) {
  for (const auto [t, n, k] : {Sizes{1030, 3, 40}, Sizes{3, 1030, 40}, Sizes{5, 7, 4100}, Sizes{4100, 7, 5},
                               Sizes{5, 4100, 7}, Sizes{1030, 1030, 9}}) {
    expect_within_roundings(Layer(DType::bf16, t, n, k));
  }
}

TEST(Linear, Bf16ResultIsTheFp32ResultRoundedOnce) {
  for (const std::int64_t k : {64, 5000}) {
    const Layer layer(DType::bf16, 9, 13, k);
    EXPECT_TRUE(layer.forward(DType::bf16).same_bits(layer.forward(DType::f32).to(DType::bf16)));
  }
}

TEST(Linear, RefusesWhatDoesNotFit) {
  OwnedTensor x(DType::bf16, {4, 8}), w(DType::bf16, {3, 8}), y(DType::bf16, {4, 3});
  OwnedTensor y64(DType::f64, {4, 3}), w32(DType::f32, {3, 8}), long_w(DType::bf16, {3, 9});
  Scratch enough(linear_workspace(DType::bf16)), short_of_one(linear_workspace(DType::bf16) - 1);
  EXPECT_EQ(linear_workspace(DType::f32), 0U);
  EXPECT_EQ(linear_workspace(DType::f64), 0U);
  EXPECT_THROW(linear_forward(short_of_one, y, x, w), ContractError);
  EXPECT_THROW(linear_forward(enough, y64, x, w), ContractError);
  EXPECT_THROW(linear_forward(enough, y, x, w32), ContractError);
  EXPECT_THROW(linear_forward(enough, y, x, long_w), ContractError);
  EXPECT_THROW(linear_backward_input(enough, x, y, w32), ContractError);
  EXPECT_THROW(linear_backward_input(enough, y, y, w), ContractError);
  EXPECT_THROW(linear_backward_weight(enough, w, y, x), ContractError);  // dw is fp32
  EXPECT_THROW(linear_backward_weight(enough, w32, x, y), ContractError);
}

TEST(Bias, IsAddedToEveryRowAndRoundedOnce) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const DType accumulator = accumulator_of(dtype);
    const OwnedTensor before = normal_tensor(dtype, {5, 67}, 4), bias = normal_tensor(accumulator, {67}, 5);
    OwnedTensor y = before, expected = before;
    add_bias(no_workspace(), y, bias);
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      // The sum in the accumulator dtype (set() rounds it there), then in the compute dtype.
      OwnedTensor sum(accumulator, {1});
      sum.set(0, before[i] + bias[i % 67]);
      expected.set(i, sum[0]);
    }
    expect_equal(y, expected);
  }
}

TEST(Bias, GradientSumsTokensInOrder) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const DType accumulator = accumulator_of(dtype);
    const OwnedTensor dy = normal_tensor(dtype, {77, 131}, 6);
    OwnedTensor dbias = constant_tensor(accumulator, {131}, 0.5), expected(accumulator, {131});
    bias_backward(no_workspace(), dbias, dy);
    for (std::int64_t c = 0; c < 131; ++c) {
      OwnedTensor sum = constant_tensor(accumulator, {1}, 0.0);
      for (std::int64_t t = 0; t < 77; ++t) sum.set(0, sum[0] + dy[t * 131 + c]);
      expected.set(c, 0.5 + sum[0]);
    }
    expect_equal(dbias, expected);
  }
}

TEST(Bias, GradientIsTheDerivative) {
  const OwnedTensor x = normal_tensor(DType::f64, {6, 5}, 7), dy = normal_tensor(DType::f64, {6, 5}, 8);
  OwnedTensor bias = normal_tensor(DType::f64, {5}, 9), dbias = constant_tensor(DType::f64, {5}, 0.0);
  bias_backward(no_workspace(), dbias, dy);
  const auto objective = [&] {
    OwnedTensor y = x;
    add_bias(no_workspace(), y, bias);
    return dot(y, dy);
  };
  expect_gradient(bias, dbias, objective, 1e-11);
}

TEST(Bias, RefusesWhatDoesNotFit) {
  OwnedTensor y(DType::bf16, {4, 3}), bias(DType::bf16, {3}), long_bias(DType::f32, {4});
  EXPECT_THROW(add_bias(no_workspace(), y, bias), ContractError);
  EXPECT_THROW(add_bias(no_workspace(), y, long_bias), ContractError);
  EXPECT_THROW(bias_backward(no_workspace(), bias, y), ContractError);
  EXPECT_THROW(bias_backward(no_workspace(), long_bias, y), ContractError);
}

}  // namespace
}  // namespace layerstream::ops
