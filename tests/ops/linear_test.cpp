#include "ops/linear.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

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

TEST(Linear, WeightGradientIsWrittenWhateverWasThereOrAdded) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto [t, n, k] : small_sizes) {
      const Layer layer(dtype, t, n, k);
      OwnedTensor dw =
          constant_tensor(accumulator_of(dtype), {n, k}, std::numeric_limits<double>::quiet_NaN());
      Scratch scratch(linear_workspace(dtype));
      linear_backward_weight(scratch, dw, layer.dy, layer.x, false);
      EXPECT_TRUE(dw.same_bits(layer.backward_weight()));
      OwnedTensor twice = layer.backward_weight();
      linear_backward_weight(scratch, twice, layer.dy, layer.x);
      linear_backward_weight(scratch, dw, layer.dy, layer.x, true);
      EXPECT_TRUE(dw.same_bits(twice));
    }
  }
}

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
/// n · 2^-24 of the sum of magnitudes, whatever its order (Higham, 2002, 3.1). Tensor cores cut digits off,
/// with errors up to twice as large, but only once for several terms.
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

/// Whole numbers in [-4, 4], which every dtype holds.
OwnedTensor whole_numbers(DType dtype, Shape shape, std::uint64_t seed) {
  return integer_tensor(shape, 9, seed).mapped(dtype, [](double value) { return value - 4.0; });
}

// Sums of at most 8192 products of at most 16 are whole numbers below 2^24, exact in FP32 in any order: a
// bf16 result can differ from the rounded FP64 one only if something else was rounded on the way. The last
// inner extent is longer than a panel of the CPU's scheme, and invites a GPU to split the sum.
TEST(Linear, Bf16ResultIsTheFp32SumRoundedOnce) {
  for (const auto [t, n, k] : {Sizes{9, 13, 64}, Sizes{9, 13, 5000}, Sizes{128, 64, 8192}}) {
    const Layer layer(whole_numbers(DType::bf16, {t, k}, 10), whole_numbers(DType::bf16, {n, k}, 11),
                      whole_numbers(DType::bf16, {t, n}, 12));
    const Layer wide = layer.widened();
    const OwnedTensor y = wide.forward(DType::f64);
    EXPECT_TRUE(layer.forward(DType::f32).same_bits(y.to(DType::f32)));
    EXPECT_TRUE(layer.forward(DType::bf16).same_bits(y.to(DType::bf16)));
    EXPECT_TRUE(layer.backward_input().same_bits(wide.backward_input().to(DType::bf16)));
    EXPECT_TRUE(layer.backward_weight().same_bits(wide.backward_weight().to(DType::f32)));
  }
}

/// residual + x · wᵀ, into a tensor of its own or over the residual.
OwnedTensor forward_onto(const OwnedTensor& residual, const Layer& layer, bool in_place) {
  OwnedTensor y = in_place ? residual : OwnedTensor(residual.dtype(), residual.shape());
  Scratch scratch(linear_workspace(layer.x.dtype()));
  linear_forward(scratch, y, layer.x, layer.w, in_place ? y : residual);
  return y;
}

/// Sums of two fp64 tensors.
OwnedTensor sum(const OwnedTensor& a, const OwnedTensor& b) {
  OwnedTensor result = a;
  for (std::int64_t i = 0; i < a.numel(); ++i) result.set(i, a[i] + b[i]);
  return result;
}

// Whole numbers again: in fp32 and fp64 everything is exact. In bf16 either the sum is rounded (CUDA), or the
// product and then the sum (CPU); the products here are beyond 256, so that the two differ.
TEST(Linear, ResidualIsAddedWithTheDocumentedRoundings) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto [t, n, k] : {Sizes{9, 13, 700}, Sizes{300, 270, 512}, Sizes{1030, 3, 2500}}) {
      const Layer layer(whole_numbers(dtype, {t, k}, 13), whole_numbers(dtype, {n, k}, 14),
                        whole_numbers(dtype, {t, n}, 15));
      const OwnedTensor product = layer.widened().forward(DType::f64), residual = layer.dy.to(DType::f64);
      const OwnedTensor once = sum(residual, product).to(dtype);
      const OwnedTensor twice = sum(residual, product.to(dtype).to(DType::f64)).to(dtype);
      EXPECT_EQ(once.same_bits(twice), dtype != DType::bf16);
      const OwnedTensor y = forward_onto(layer.dy, layer, false);
      EXPECT_TRUE(y.same_bits(once) || y.same_bits(twice));
      EXPECT_TRUE(forward_onto(layer.dy, layer, true).same_bits(y));
    }
  }
}

TEST(Linear, ResidualIsAddedToResultsOfTheAccumulatorDtype) {
  const Layer layer(whole_numbers(DType::bf16, {9, 700}, 16), whole_numbers(DType::bf16, {13, 700}, 17),
                    whole_numbers(DType::bf16, {9, 13}, 18));
  const OwnedTensor residual = layer.dy.to(DType::f32);
  const OwnedTensor expected = sum(residual.to(DType::f64), layer.widened().forward(DType::f64));
  for (const bool in_place : {false, true}) {
    EXPECT_TRUE(forward_onto(residual, layer, in_place).same_bits(expected.to(DType::f32)));
  }
}

TEST(Linear, SumsOntoAResidualStayWithinTheirRoundings) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Layer layer(dtype, 33, 17, 650), wide = layer.widened();
    const OwnedTensor residual = wide.dy, product = wide.forward(DType::f64);
    const OwnedTensor expected = sum(residual, product), sizes = wide.absolute().forward(DType::f64);
    const double output = dtype == DType::bf16 ? bf16_roundoff : fp32_roundoff;
    for (const bool in_place : {false, true}) {
      // 651 terms in FP32, then at most a rounding of the product and one of the sum.
      expect_within(forward_onto(layer.dy, layer, in_place), expected, [&](std::int64_t i) {
        const double sums = 651.0 * fp32_roundoff * (sizes[i] + std::fabs(residual[i]));
        return 1.01 * (sums + output * (std::fabs(product[i]) + std::fabs(expected[i])));
      });
    }
  }
}

// The same bits wherever in a buffer the operands begin, as long as their alignment class is the same: chunks
// and parameters are rows of larger tensors.
TEST(Linear, ResultDoesNotDependOnThePlaceOfItsRows) {
  const std::int64_t t = 24, n = 40, k = 72;
  const Layer layer(DType::bf16, t, n, k);
  const OwnedTensor expected = layer.forward(DType::bf16);
  OwnedTensor x(DType::bf16, {t + 3, k}), y(DType::bf16, {t + 1, n});
  const TensorView x_rows = x.view().rows(3, t), y_rows = y.view().rows(1, t);
  std::memcpy(x_rows.data(), layer.x.view().data(), layer.x.bytes());
  Scratch scratch(linear_workspace(DType::bf16));
  linear_forward(scratch, y_rows, x_rows, layer.w);
  for (std::int64_t i = 0; i < expected.numel(); ++i) ASSERT_EQ(y[n + i], expected[i]);
}

TEST(Linear, RefusesWhatDoesNotFit) {
  OwnedTensor x(DType::bf16, {4, 8}), w(DType::bf16, {3, 8}), y(DType::bf16, {4, 3});
  OwnedTensor y64(DType::f64, {4, 3}), w32(DType::f32, {3, 8}), long_w(DType::bf16, {3, 9});
  Scratch enough(linear_workspace(DType::bf16)), short_of_one(linear_workspace(DType::bf16) - 1);
  EXPECT_THROW(linear_forward(short_of_one, y, x, w), ContractError);
  EXPECT_THROW(linear_forward(enough, y64, x, w), ContractError);
  EXPECT_THROW(linear_forward(enough, y, x, w32), ContractError);
  EXPECT_THROW(linear_forward(enough, y, x, long_w), ContractError);
  EXPECT_THROW(linear_forward(enough, y, x, w, y64), ContractError);  // a residual has y's dtype
  EXPECT_THROW(linear_forward(enough, y, x, w, x), ContractError);    // and its shape
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
    // Few rows, and as many as a device sums in clusters of blocks; tiles of columns that are not full.
    for (const std::int64_t tokens : {77, 1301}) {
      const DType accumulator = accumulator_of(dtype);
      const OwnedTensor dy = normal_tensor(dtype, {tokens, 131}, 6);
      OwnedTensor dbias = constant_tensor(accumulator, {131}, 0.5), expected(accumulator, {131});
      bias_backward(no_workspace(), dbias, dy);
      for (std::int64_t c = 0; c < 131; ++c) {
        OwnedTensor sum = constant_tensor(accumulator, {1}, 0.0);
        for (std::int64_t t = 0; t < tokens; ++t) sum.set(0, sum[0] + dy[t * 131 + c]);
        expected.set(c, 0.5 + sum[0]);
      }
#if defined(LAYERSTREAM_TEST_ON_GPU)
      // Partial sums in another fixed order: each of the additions of both may round.
      const double roundoff = dtype == DType::f64 ? 0x1p-53 : fp32_roundoff;
      expect_within(dbias, expected, [&](std::int64_t c) {
        double magnitude = 0.5;
        for (std::int64_t t = 0; t < tokens; ++t) magnitude += std::fabs(dy[t * 131 + c]);
        return 2.0 * static_cast<double>(tokens) * roundoff * magnitude;
      });
#else
      expect_equal(dbias, expected);
#endif
    }
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
