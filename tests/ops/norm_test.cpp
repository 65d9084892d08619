#include "ops/norm.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "tests/ops/ops_test.hpp"
#include "tests/support/finite_difference.hpp"

namespace layerstream::ops {
namespace {

using namespace layerstream::test;

constexpr double eps = 1e-6;

struct Sizes {
  std::int64_t tokens, hidden_size;
};
// One element, odd tails of the 16-lane sums, one and several blocks of 16 rows, more than 512 blocks, more
// rows than a device has under way at once, and more than the lanes of a device keep of a row in registers.
constexpr Sizes all_sizes[] = {{1, 1},    {1, 3},    {5, 7},      {16, 16},  {17, 33},
                               {53, 130}, {8209, 5}, {2311, 100}, {3, 8200}, {3, 8208}};

struct Gradients {
  OwnedTensor dx, dweight;
};

Gradients backward(const OwnedTensor& dy, const OwnedTensor& x, const OwnedTensor& weight,
                   const OwnedTensor* residual = nullptr, TensorView y = {}) {
  Gradients result{OwnedTensor(x.dtype(), x.shape()), constant_tensor(weight.dtype(), weight.shape(), 0.0)};
  Scratch scratch(rms_norm_backward_workspace(x.shape()[0], x.shape()[1], x.dtype()));
  rms_norm_backward(scratch, {.dx = result.dx,
                              .dweight = result.dweight,
                              .y = y,
                              .dy = dy,
                              .x = x,
                              .weight = weight,
                              .residual = residual == nullptr ? ConstTensorView() : residual->view(),
                              .eps = eps});
  return result;
}

OwnedTensor forward(const OwnedTensor& x, const OwnedTensor& weight) {
  OwnedTensor y(x.dtype(), x.shape());
  rms_norm_forward(no_workspace(), y, x, weight, eps);
  return y;
}

TEST(RmsNorm, Fp64FollowsTheFormula) {
  for (const auto [tokens, hidden_size] : all_sizes) {
    const OwnedTensor x = normal_tensor(DType::f64, {tokens, hidden_size}, 1, 2.0);
    const OwnedTensor weight = normal_tensor(DType::f64, {hidden_size}, 2, 0.3, 1.0);
    OwnedTensor expected(DType::f64, x.shape());
    for (std::int64_t t = 0; t < tokens; ++t) {
      double squares = 0.0;
      for (std::int64_t i = 0; i < hidden_size; ++i)
        squares += x[t * hidden_size + i] * x[t * hidden_size + i];
      const double rms = std::sqrt(squares / static_cast<double>(hidden_size) + eps);
      for (std::int64_t i = 0; i < hidden_size; ++i) {
        expected.set(t * hidden_size + i, x[t * hidden_size + i] / rms * weight[i]);
      }
    }
    // Two orders of a sum of positive numbers and a handful of roundings.
    const double tolerance = (static_cast<double>(hidden_size) + 8.0) * 0x1p-53;
    expect_within(forward(x, weight), expected,
                  [&](std::int64_t i) { return tolerance * std::fabs(expected[i]); });
  }
}

TEST(RmsNorm, BackwardIsTheDerivativeOfForwardPlusBypass) {
  const OwnedTensor residual = normal_tensor(DType::f64, {19, 7}, 3);
  const OwnedTensor dy = normal_tensor(DType::f64, {19, 7}, 4);
  OwnedTensor x = normal_tensor(DType::f64, {19, 7}, 5);
  OwnedTensor weight = normal_tensor(DType::f64, {7}, 6, 0.3, 1.0);
  for (const OwnedTensor* bypass : {static_cast<const OwnedTensor*>(nullptr), &residual}) {
    const Gradients gradients = backward(dy, x, weight, bypass);
    const auto objective = [&] {
      return dot(forward(x, weight), dy) + (bypass == nullptr ? 0.0 : dot(x, *bypass));
    };
    // Truncation of the difference at step 1e-3, with rows as short as 7: below 1e-9 here.
    expect_gradient(x, gradients.dx, objective, 1e-8);
    expect_gradient(weight, gradients.dweight, objective, 1e-10);
  }
}

// Whatever shares out a row in either pass, and however memory is aligned: see the sizes above; rows of one
// and of two pieces to a lane of a device's forward and backward pass, with and without lanes to spare, and
// longer ones.
TEST(RmsNorm, BackwardGivesTheBitsOfForwardAgain) {
  constexpr Sizes more_sizes[] = {{7, 896},  {37, 3584}, {5, 3592}, {5, 4096}, {5, 4104},
                                  {6, 5120}, {9, 8192},  {3, 8193}, {2, 10240}};
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    std::vector<Sizes> sizes(std::begin(all_sizes), std::end(all_sizes));
    sizes.insert(sizes.end(), std::begin(more_sizes), std::end(more_sizes));
    for (const auto [tokens, hidden_size] : sizes) {
      const OwnedTensor dy = normal_tensor(dtype, {tokens, hidden_size}, 31);
      const OwnedTensor x = normal_tensor(dtype, dy.shape(), 32, 2.0);
      const OwnedTensor residual = normal_tensor(dtype, dy.shape(), 33);
      const OwnedTensor weight = normal_tensor(accumulator_of(dtype), {hidden_size}, 34, 0.3, 1.0);
      const OwnedTensor expected = forward(x, weight);
      for (const OwnedTensor* bypass : {static_cast<const OwnedTensor*>(nullptr), &residual}) {
        const Gradients alone = backward(dy, x, weight, bypass);
        OwnedTensor y(dtype, x.shape());
        const Gradients beside = backward(dy, x, weight, bypass, y);
        EXPECT_TRUE(y.same_bits(expected)) << name_of(dtype) << ", " << tokens << " x " << hidden_size;
        EXPECT_TRUE(beside.dx.same_bits(alone.dx)) << name_of(dtype) << ", " << hidden_size;
        EXPECT_TRUE(beside.dweight.same_bits(alone.dweight)) << name_of(dtype) << ", " << hidden_size;
      }
    }
  }
}

TEST(RmsNorm, WeightGradientIsAddedToWhatIsThere) {
  const OwnedTensor dy = normal_tensor(DType::f32, {40, 9}, 7), x = normal_tensor(DType::f32, {40, 9}, 8);
  const OwnedTensor weight = normal_tensor(DType::f32, {9}, 9);
  const Gradients once = backward(dy, x, weight);
  OwnedTensor dx(DType::f32, x.shape()), dweight = once.dweight;
  Scratch scratch(rms_norm_backward_workspace(40, 9, DType::f32));
  rms_norm_backward(
      scratch,
      {.dx = dx, .dweight = dweight, .dy = dy, .x = x, .weight = weight, .residual = {}, .eps = eps});
  expect_equal(dweight, once.dweight.mapped(DType::f32, [](double value) { return 2.0 * value; }));
}

TEST(RmsNorm, OutputsMayTakeThePlaceOfInputs) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const DType accumulator = accumulator_of(dtype);
    const OwnedTensor dy = normal_tensor(dtype, {21, 37}, 10), x = normal_tensor(dtype, {21, 37}, 11);
    const OwnedTensor residual = normal_tensor(dtype, {21, 37}, 12);
    const OwnedTensor weight = normal_tensor(accumulator, {37}, 13);
    const OwnedTensor y = forward(x, weight);
    OwnedTensor y_in_place = x;
    rms_norm_forward(no_workspace(), y_in_place, y_in_place, weight, eps);
    EXPECT_TRUE(y_in_place.same_bits(y));

    const Gradients apart = backward(dy, x, weight, &residual);
    Scratch scratch(rms_norm_backward_workspace(21, 37, dtype));
    for (const bool over_dy : {true, false}) {
      OwnedTensor grad = dy, bypass = residual, dweight = constant_tensor(accumulator, {37}, 0.0);
      OwnedTensor& dx = over_dy ? grad : bypass;
      rms_norm_backward(scratch, {.dx = dx,
                                  .dweight = dweight,
                                  .dy = grad,
                                  .x = x,
                                  .weight = weight,
                                  .residual = bypass,
                                  .eps = eps});
      EXPECT_TRUE(dx.same_bits(apart.dx));
      EXPECT_TRUE(dweight.same_bits(apart.dweight));
    }
  }
}

// Sums of powers of two are exact in any order, so the test can repeat Hugging Face's roundings bit for
// bit: the normalised value to bf16, times the weight, to bf16.
TEST(RmsNorm, Bf16RoundsWhereHuggingFaceRounds) {
  OwnedTensor x(DType::bf16, {3, 24});
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.set(i, std::ldexp(i % 3 == 0 ? -1.0 : 1.0,
                        static_cast<int>(uniform_at(1, 2, static_cast<std::uint64_t>(i)) * 5.0)));
  }
  const OwnedTensor weight = normal_tensor(DType::bf16, {24}, 14, 0.3, 1.0).to(DType::f32);
  const OwnedTensor y = forward(x, weight);
  for (std::int64_t t = 0; t < 3; ++t) {
    float squares = 0.0F;
    for (std::int64_t i = 0; i < 24; ++i) squares += static_cast<float>(x[t * 24 + i] * x[t * 24 + i]);
    const float inverse = 1.0F / std::sqrt(squares / 24.0F + static_cast<float>(eps));
    for (std::int64_t i = 0; i < 24; ++i) {
      const float normalised = to_float(to_bf16(static_cast<float>(x[t * 24 + i]) * inverse));
      EXPECT_EQ(y.as<bf16>()[t * 24 + i].bits, to_bf16(static_cast<float>(weight[i]) * normalised).bits);
    }
  }
}

TEST(RmsNorm, LowerPrecisionStaysWithinItsRoundings) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const double output = dtype == DType::bf16 ? bf16_roundoff : fp32_roundoff;
    for (const auto [tokens, hidden_size] : all_sizes) {
      const Shape shape{tokens, hidden_size};
      const OwnedTensor dy = normal_tensor(dtype, shape, 15), x = normal_tensor(dtype, shape, 16);
      const OwnedTensor residual = normal_tensor(dtype, shape, 17);
      const OwnedTensor weight = normal_tensor(DType::f32, {hidden_size}, 18, 0.3, 1.0);
      const OwnedTensor dy64 = dy.to(DType::f64), x64 = x.to(DType::f64), weight64 = weight.to(DType::f64);
      const OwnedTensor residual64 = residual.to(DType::f64);
      // The FP32 arithmetic before the last rounding: sums of n/16 terms and a tree in each lane.
      const double inner = (static_cast<double>(hidden_size) / 16.0 + 12.0) * fp32_roundoff;

      const OwnedTensor y64 = forward(x64, weight64);
      // Two roundings: normalised value and product.
      expect_within(forward(x, weight), y64,
                    [&](std::int64_t i) { return (2.01 * output + inner) * std::fabs(y64[i]); });

      const Gradients low = backward(dy, x, weight, &residual);
      const Gradients high = backward(dy64, x64, weight64, &residual64);
      // One rounding of the result, and FP32 errors of terms that may cancel: 1/rms, |g| and |n| are
      // each below 10 in rows that are not nearly zero; a row of one element is, so x is divided by its size.
      std::vector<double> squares(static_cast<std::size_t>(tokens)), sums_of_row(squares.size());
      for (std::int64_t i = 0; i < x64.numel(); ++i) {
        const auto row = static_cast<std::size_t>(i / hidden_size);
        squares[row] += x64[i] * x64[i];
        sums_of_row[row] += std::fabs(dy64[i] * weight64[i % hidden_size] * x64[i]);
      }
      expect_within(low.dx, high.dx, [&](std::int64_t i) {
        const auto row = static_cast<std::size_t>(i / hidden_size);
        const double n = static_cast<double>(hidden_size);
        const double inverse = 1.0 / std::sqrt(squares[row] / n + eps);
        const double terms = inverse * (std::fabs(dy64[i] * weight64[i % hidden_size]) +
                                        std::fabs(x64[i]) * inverse * inverse * sums_of_row[row] / n);
        return 1.01 * output * std::fabs(high.dx[i]) + 3.0 * inner * (terms + std::fabs(residual64[i]));
      });

      // dy · n, n rounded to the compute dtype; then FP32 sums of up to `tokens` terms.
      const Gradients magnitude = backward(dy64.absolute(), x64.absolute(), weight64);
      const double sums = inner + (17.0 + 512.0) * fp32_roundoff;
      expect_within(low.dweight, high.dweight,
                    [&](std::int64_t i) { return (1.01 * output + sums) * magnitude.dweight[i]; });
    }
  }
}

TEST(RmsNorm, RefusesWhatDoesNotFit) {
  OwnedTensor y(DType::f32, {4, 8}), x(DType::f32, {4, 8}), weight(DType::f32, {8}), dweight(DType::f32, {8});
  OwnedTensor narrow(DType::f32, {4, 7}), half(DType::bf16, {4, 8}), wide(DType::f64, {8});
  EXPECT_THROW(rms_norm_forward(no_workspace(), narrow, x, weight, eps), ContractError);
  EXPECT_THROW(rms_norm_forward(no_workspace(), half, x, weight, eps), ContractError);
  EXPECT_THROW(rms_norm_forward(no_workspace(), y, x, wide, eps), ContractError);
  EXPECT_THROW(rms_norm_forward(no_workspace(), y, x, {}, eps), ContractError);
  const RmsNormBackward good{
      .dx = y, .dweight = dweight, .dy = x, .x = x, .weight = weight, .residual = {}, .eps = eps};
  const std::size_t bytes = rms_norm_backward_workspace(4, 8, DType::f32);
  Scratch enough(bytes), short_of_one(bytes - 1);
  EXPECT_NO_THROW(rms_norm_backward(enough, good));
  EXPECT_THROW(rms_norm_backward(short_of_one, good), ContractError);
  RmsNormBackward bad = good;
  bad.residual = narrow;
  EXPECT_THROW(rms_norm_backward(enough, bad), ContractError);
  bad = good;
  bad.y = half;
  EXPECT_THROW(rms_norm_backward(enough, bad), ContractError);
  bad = good;
  bad.dweight = half;
  EXPECT_THROW(rms_norm_backward(enough, bad), ContractError);
}

TEST(RmsNorm, NoTokensLeaveTheWeightGradientAlone) {
  const OwnedTensor nothing(DType::f32, {0, 8}), weight = normal_tensor(DType::f32, {8}, 19);
  OwnedTensor dx(DType::f32, {0, 8}), dweight = constant_tensor(DType::f32, {8}, 3.0);
  rms_norm_backward(no_workspace(), {.dx = dx,
                                     .dweight = dweight,
                                     .dy = nothing,
                                     .x = nothing,
                                     .weight = weight,
                                     .residual = {},
                                     .eps = eps});
  expect_equal(dweight, constant_tensor(DType::f32, {8}, 3.0));
}

}  // namespace
}  // namespace layerstream::ops
