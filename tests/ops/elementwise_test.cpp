#include "ops/elementwise.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "tests/ops/ops_test.hpp"
#include "tests/support/finite_difference.hpp"

namespace layerstream::ops {
namespace {

using namespace layerstream::test;

constexpr DType compute_dtypes[] = {DType::f64, DType::f32, DType::bf16};

TEST(Add, RoundsTheSumOnce) {
  for (const DType dtype : compute_dtypes) {
    for (const std::int64_t n : {1, 3, 4097, 9000}) {
      const OwnedTensor a = normal_tensor(dtype, {n}, 1), b = normal_tensor(dtype, {n}, 2);
      OwnedTensor out(dtype, {n}), expected(dtype, {n});
      // Rounding the sum to a type with more than twice the digits first changes nothing (Figueroa, 1995).
      for (std::int64_t i = 0; i < n; ++i) expected.set(i, a[i] + b[i]);
      add(no_workspace(), out, a, b);
      expect_equal(out, expected);
    }
  }
}

TEST(Add, OutputMayBeEitherOperand) {
  for (const DType dtype : compute_dtypes) {
    const OwnedTensor a = normal_tensor(dtype, {7, 31}, 3), b = normal_tensor(dtype, {7, 31}, 4);
    OwnedTensor apart(dtype, a.shape()), over_a = a, over_b = b;
    add(no_workspace(), apart, a, b);
    add(no_workspace(), over_a, over_a, b);
    add(no_workspace(), over_b, a, over_b);
    EXPECT_TRUE(over_a.same_bits(apart));
    EXPECT_TRUE(over_b.same_bits(apart));
  }
}

OwnedTensor swiglu(const OwnedTensor& gate_up) {
  OwnedTensor act(gate_up.dtype(), {gate_up.shape()[0], gate_up.shape()[1] / 2});
  swiglu_forward(no_workspace(), act, gate_up);
  return act;
}

OwnedTensor swiglu_gradient(const OwnedTensor& dact, const OwnedTensor& gate_up) {
  OwnedTensor result(gate_up.dtype(), gate_up.shape());
  swiglu_backward(no_workspace(), result, dact, gate_up);
  return result;
}

TEST(Swiglu, Fp64FollowsTheFormula) {
  for (const auto& [tokens, columns] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 5}, {17, 130}}) {
    const OwnedTensor gate_up = normal_tensor(DType::f64, {tokens, 2 * columns}, 5, 3.0);
    const OwnedTensor act = swiglu(gate_up);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = 0; i < columns; ++i) {
        const double gate = gate_up[t * 2 * columns + i], up = gate_up[t * 2 * columns + columns + i];
        const double expected = gate / (1.0 + std::exp(-gate)) * up;
        // Five roundings and one exponential of about one ulp.
        ASSERT_NEAR(act[t * columns + i], expected, 8.0 * 0x1p-53 * std::fabs(expected));
      }
    }
  }
}

TEST(Swiglu, BackwardIsTheDerivative) {
  OwnedTensor gate_up = normal_tensor(DType::f64, {4, 14}, 6, 2.0);
  const OwnedTensor dact = normal_tensor(DType::f64, {4, 7}, 7);
  // Truncation of the five-point difference is below 1e-12 here; the rest is rounding.
  expect_gradient(
      gate_up, swiglu_gradient(dact, gate_up), [&] { return dot(swiglu(gate_up), dact); }, 1e-10);
}

TEST(Swiglu, GradientMayTakeThePlaceOfItsInput) {
  for (const DType dtype : compute_dtypes) {
    OwnedTensor gate_up = normal_tensor(dtype, {5, 66}, 8);
    const OwnedTensor dact = normal_tensor(dtype, {5, 33}, 9);
    const OwnedTensor apart = swiglu_gradient(dact, gate_up);
    swiglu_backward(no_workspace(), gate_up, dact, gate_up);
    EXPECT_TRUE(gate_up.same_bits(apart));
  }
}

TEST(Swiglu, BackwardMakesTheForwardsOutputAgainAlsoInThePlaceOfItsGradient) {
  for (const DType dtype : compute_dtypes) {
    for (const std::int64_t columns : {33, 256}) {
      OwnedTensor gate_up = normal_tensor(dtype, {5, 2 * columns}, 8, 3.0);
      OwnedTensor dact = normal_tensor(dtype, {5, columns}, 9);
      const OwnedTensor act = swiglu(gate_up);
      const OwnedTensor gradient = swiglu_gradient(dact, gate_up);
      swiglu_backward(no_workspace(), gate_up, dact, gate_up, dact);
      EXPECT_TRUE(dact.same_bits(act));
      EXPECT_TRUE(gate_up.same_bits(gradient));
    }
  }
}

TEST(Swiglu, LowerPrecisionStaysWithinItsRoundings) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const double output = dtype == DType::bf16 ? bf16_roundoff : 0.0;
    const OwnedTensor gate_up = normal_tensor(dtype, {9, 130}, 10, 3.0),
                      dact = normal_tensor(dtype, {9, 65}, 11);
    const OwnedTensor gate_up64 = gate_up.to(DType::f64), dact64 = dact.to(DType::f64);
    const OwnedTensor act = swiglu(gate_up64), gradient = swiglu_gradient(dact64, gate_up64);
    // Eight FP32 roundings (an exponential counts for two); 1 + gate · (1 − s) may cancel: absolute there,
    // with gates and factors below 12 and their product below 60.
    expect_within(swiglu(gate_up), act,
                  [&](std::int64_t i) { return (1.01 * output + 8.0 * fp32_roundoff) * std::fabs(act[i]); });
    expect_within(swiglu_gradient(dact, gate_up), gradient, [&](std::int64_t i) {
      return (1.01 * output + 8.0 * fp32_roundoff) * std::fabs(gradient[i]) + 60.0 * 8.0 * fp32_roundoff;
    });
  }
}

TEST(Swiglu, SaturatesWithoutNan) {
  for (const DType dtype : compute_dtypes) {
    OwnedTensor gate_up(dtype, {1, 4});
    for (const auto& [i, value] : {std::pair<int, double>{0, -1024.0}, {1, 1024.0}, {2, 2.0}, {3, 2.0}}) {
      gate_up.set(i, value);
    }
    const OwnedTensor act = swiglu(gate_up), dact = constant_tensor(dtype, {1, 2}, 1.0);
    EXPECT_EQ(act[0], 0.0);
    EXPECT_EQ(act[1], 2048.0);
    const OwnedTensor gradient = swiglu_gradient(dact, gate_up);
    EXPECT_EQ(gradient[0], 0.0);
    EXPECT_EQ(gradient[1], 2.0);
    EXPECT_EQ(gradient[2], 0.0);
    EXPECT_EQ(gradient[3], 1024.0);
  }
}

TEST(MergeHalves, GivesBackEveryFp32BitPattern) {
  constexpr std::int64_t n = 70001;
  OwnedTensor hi(DType::bf16, {n}), lo(DType::i16, {n}), out(DType::f32, {n});
  const auto pattern = [](std::int64_t i) { return static_cast<std::uint32_t>(i) * 61357u + 0x7f7fu; };
  for (std::int64_t i = 0; i < n; ++i) {
    const SplitFloat halves = split(std::bit_cast<float>(pattern(i)));
    hi.as<bf16>()[i] = halves.hi;
    lo.as<std::int16_t>()[i] = halves.lo;
  }
  merge_halves(no_workspace(), out, hi, lo);
  for (std::int64_t i = 0; i < n; ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(out.as<float>()[i]), pattern(i));
}

TEST(FillZero, ClearsEveryByteOfEveryElementSize) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::u8}) {
    OwnedTensor out(dtype, {3, 1367});
    fill_zero(no_workspace(), out);
    wait_for_device();
    const auto* bytes = static_cast<const std::byte*>(out.view().data());
    for (std::size_t i = 0; i < out.bytes(); ++i) ASSERT_EQ(bytes[i], std::byte{0});
  }
}

double squares_of(const OwnedTensor& x) {
  OwnedTensor result(DType::f64, {1});
  Scratch scratch(sum_of_squares_workspace(x.numel()));
  sum_of_squares(scratch, result.view().as<double>(), x);
  return result[0];
}

TEST(SumOfSquares, MatchesExtendedPrecision) {
  for (const std::int64_t n : {0, 1, 3, 16383, 16384, 16385, 100003}) {
    const OwnedTensor x = normal_tensor(DType::f32, {n}, 12);
    long double expected = 0.0L;
    for (std::int64_t i = 0; i < n; ++i) expected += static_cast<long double>(x[i]) * x[i];
    // Sums of 1024 terms per lane, a tree, and the tiles: below 1100 roundings of positive terms.
    EXPECT_NEAR(squares_of(x), static_cast<double>(expected),
                1100.0 * 0x1p-53 * static_cast<double>(expected));
  }
}

TEST(SumOfSquares, IsFiniteExactlyWhenItsInputIs) {
  OwnedTensor x = constant_tensor(DType::f32, {20000}, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(squares_of(x)));
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity()}) {
    for (const std::int64_t where : {0, 16384, 19999}) {
      OwnedTensor spoilt = x;
      spoilt.set(where, bad);
      EXPECT_FALSE(std::isfinite(squares_of(spoilt)));
    }
  }
}

TEST(Elementwise, RefusesWhatDoesNotFit) {
  OwnedTensor a(DType::bf16, {4, 6}), b(DType::bf16, {6, 4}), c(DType::f32, {4, 6}), lo(DType::i16, {4, 6});
  OwnedTensor half(DType::bf16, {4, 3}), x(DType::f32, {40000});
  double result = 0.0;
  Scratch scratch(sum_of_squares_workspace(x.numel()) - 1);
  EXPECT_THROW(add(no_workspace(), a, a, b), ContractError);
  EXPECT_THROW(add(no_workspace(), a, c, a), ContractError);
  EXPECT_THROW(add(no_workspace(), lo, lo, lo), ContractError);
  EXPECT_THROW(swiglu_forward(no_workspace(), a, a), ContractError);
  EXPECT_THROW(swiglu_forward(no_workspace(), half, c), ContractError);
  EXPECT_THROW(swiglu_backward(no_workspace(), half, half, a), ContractError);
  EXPECT_THROW(merge_halves(no_workspace(), a, a, lo), ContractError);
  EXPECT_THROW(merge_halves(no_workspace(), c, a, a), ContractError);
  EXPECT_THROW(fill_zero(no_workspace(), {}), ContractError);
  EXPECT_THROW(sum_of_squares(scratch, &result, x), ContractError);
  EXPECT_THROW(sum_of_squares(scratch, &result, a), ContractError);
  EXPECT_THROW(sum_of_squares(scratch, nullptr, c), ContractError);
}

}  // namespace
}  // namespace layerstream::ops
