#include "ops/loss.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "tests/ops/ops_test.hpp"
#include "tests/support/finite_difference.hpp"

namespace layerstream::ops {
namespace {

using namespace layerstream::test;

struct Sizes {
  std::int64_t tokens, vocab_size;
};
// One class, odd sizes around the 16 lanes, and a real vocabulary's length.
constexpr Sizes all_sizes[] = {{1, 1}, {1, 3}, {5, 16}, {9, 37}, {3, 50257}};
constexpr double scale = 0.125;

struct Result {
  OwnedTensor dlogits, nll;
};

Result run(const OwnedTensor& logits, const OwnedTensor& targets, DType compute) {
  Result result{OwnedTensor(compute, logits.shape()), OwnedTensor(DType::f64, targets.shape())};
  cross_entropy(
      no_workspace(),
      {.dlogits = result.dlogits, .nll = result.nll, .logits = logits, .targets = targets, .scale = scale});
  return result;
}

/// Random targets; every third position carries no loss.
OwnedTensor some_targets(std::int64_t tokens, std::int64_t vocab_size) {
  OwnedTensor targets = integer_tensor({tokens}, vocab_size, 1);
  for (std::int64_t t = 1; t < tokens; t += 3) targets.set(t, ignored_target);
  return targets;
}

TEST(CrossEntropy, Fp64FollowsTheFormula) {
  for (const auto [tokens, vocab_size] : all_sizes) {
    const OwnedTensor logits = normal_tensor(DType::f64, {tokens, vocab_size}, 2, 3.0);
    const OwnedTensor targets = some_targets(tokens, vocab_size);
    const Result result = run(logits, targets, DType::f64);
    for (std::int64_t t = 0; t < tokens; ++t) {
      long double sum = 0.0L;
      for (std::int64_t i = 0; i < vocab_size; ++i)
        sum += std::exp(static_cast<long double>(logits[t * vocab_size + i]));
      const auto target = static_cast<std::int64_t>(targets[t]);
      const bool ignored = target == ignored_target;
      const double nll = ignored ? 0.0 : static_cast<double>(std::log(sum)) - logits[t * vocab_size + target];
      // Losses below 40: a few roundings of numbers of that size; the sum has n / 16 roundings.
      EXPECT_NEAR(result.nll[t], nll, (static_cast<double>(vocab_size) / 16.0 + 64.0) * 0x1p-53);
      for (std::int64_t i = 0; i < vocab_size; ++i) {
        const double p =
            static_cast<double>(std::exp(static_cast<long double>(logits[t * vocab_size + i])) / sum);
        const double expected = ignored ? 0.0 : scale * (p - (i == target ? 1.0 : 0.0));
        ASSERT_NEAR(result.dlogits[t * vocab_size + i], expected, 1e-15);  // numbers below 0.125
      }
    }
  }
}

TEST(CrossEntropy, GradientIsTheDerivativeOfTheScaledLoss) {
  OwnedTensor logits = normal_tensor(DType::f64, {7, 5}, 3, 2.0);
  const OwnedTensor targets = some_targets(7, 5);
  const Result result = run(logits, targets, DType::f64);
  const auto objective = [&] {
    OwnedTensor nll(DType::f64, {7});
    cross_entropy(no_workspace(),
                  {.dlogits = {}, .nll = nll, .logits = logits, .targets = targets, .scale = 1.0});
    OwnedTensor total = constant_tensor(DType::f64, {1}, 0.0);
    add_sum(no_workspace(), total.view().as<double>(), nll);
    return scale * total[0];
  };
  expect_gradient(logits, result.dlogits, objective, 1e-10);
}

TEST(CrossEntropy, IgnoredTargetsHaveNeitherLossNorGradient) {
  for (const DType compute : {DType::f64, DType::f32, DType::bf16}) {
    const OwnedTensor logits = normal_tensor(accumulator_of(compute), {4, 33}, 4);
    const OwnedTensor targets = constant_tensor(DType::i32, {4}, ignored_target);
    const Result result = run(logits, targets, compute);
    expect_equal(result.dlogits, constant_tensor(compute, {4, 33}, 0.0));
    expect_equal(result.nll, constant_tensor(DType::f64, {4}, 0.0));
  }
}

TEST(CrossEntropy, LossAloneIsTheSameLoss) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    const OwnedTensor logits = normal_tensor(dtype, {9, 37}, 5, 3.0), targets = some_targets(9, 37);
    OwnedTensor nll(DType::f64, {9});
    cross_entropy(no_workspace(),
                  {.dlogits = {}, .nll = nll, .logits = logits, .targets = targets, .scale = 1.0});
    EXPECT_TRUE(nll.same_bits(run(logits, targets, dtype).nll));
  }
}

TEST(CrossEntropy, GradientMayTakeThePlaceOfTheLogits) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    OwnedTensor logits = normal_tensor(dtype, {9, 131}, 6, 3.0), nll(DType::f64, {9});
    const OwnedTensor targets = some_targets(9, 131);
    const Result apart = run(logits, targets, dtype);
    cross_entropy(no_workspace(),
                  {.dlogits = logits, .nll = nll, .logits = logits, .targets = targets, .scale = scale});
    EXPECT_TRUE(logits.same_bits(apart.dlogits));
    EXPECT_TRUE(nll.same_bits(apart.nll));
  }
}

TEST(CrossEntropy, LowerPrecisionStaysWithinItsRoundings) {
  for (const DType compute : {DType::f32, DType::bf16}) {
    const double output = compute == DType::bf16 ? bf16_roundoff : 0.0;
    for (const auto [tokens, vocab_size] : all_sizes) {
      const OwnedTensor logits = normal_tensor(DType::f32, {tokens, vocab_size}, 7, 3.0);
      const OwnedTensor targets = some_targets(tokens, vocab_size);
      const Result low = run(logits, targets, compute),
                   high = run(logits.to(DType::f64), targets, DType::f64);
      // logit − max is below 32, so its rounding is worth 32 · 2^-24 relative in the exponential, which adds
      // its own 2; sums and logarithms are fp64.
      const double exponential = 34.0 * fp32_roundoff;
      expect_within(low.nll, high.nll, [&](std::int64_t) { return 1.01 * exponential; });
      expect_within(low.dlogits, high.dlogits, [&](std::int64_t i) {
        return 1.01 * output * std::fabs(high.dlogits[i]) + scale * (2.0 * exponential + 4.0 * fp32_roundoff);
      });
    }
  }
}

TEST(CrossEntropy, HugeLogitsAreStable) {
  OwnedTensor logits = constant_tensor(DType::f32, {1, 3}, -3.0e38),
              targets = constant_tensor(DType::i32, {1}, 1.0);
  logits.set(1, 3.0e38);
  const Result result = run(logits, targets, DType::f32);
  EXPECT_EQ(result.nll[0], 0.0);
  expect_equal(result.dlogits, constant_tensor(DType::f32, {1, 3}, 0.0));
}

TEST(CrossEntropy, NotANumberIsNotHidden) {
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    OwnedTensor logits = normal_tensor(DType::f32, {1, 40}, 8);
    logits.set(35, bad);
    const Result result = run(logits, constant_tensor(DType::i32, {1}, 2.0), DType::bf16);
    EXPECT_FALSE(std::isfinite(result.nll[0]));
    EXPECT_TRUE(std::isnan(result.dlogits[0]));
  }
}

TEST(AddSum, IsTheSameHoweverTheTokensAreTiled) {
  const OwnedTensor values = normal_tensor(DType::f64, {101}, 9);
  double in_order = 0.25;
  for (std::int64_t i = 0; i < 101; ++i) in_order += values[i];
  for (const std::int64_t tile : {101, 17, 1}) {
    OwnedTensor result = constant_tensor(DType::f64, {1}, 0.25);
    for (std::int64_t begin = 0; begin < 101; begin += tile) {
      add_sum(no_workspace(), result.view().as<double>(),
              values.view().rows(begin, std::min<std::int64_t>(tile, 101 - begin)));
    }
    EXPECT_EQ(result[0], in_order);
  }
}

TEST(CrossEntropy, RefusesWhatDoesNotFit) {
  OwnedTensor logits(DType::f32, {4, 8}), dlogits(DType::bf16, {4, 8}), nll(DType::f64, {4}),
      targets(DType::i32, {4});
  OwnedTensor narrow(DType::bf16, {4, 7}), nll32(DType::f32, {4}), wide_targets(DType::i64, {4});
  const CrossEntropy good{.dlogits = dlogits, .nll = nll, .logits = logits, .targets = targets, .scale = 1.0};
  const auto refuses = [&](auto&& spoil) {
    CrossEntropy bad = good;
    spoil(bad);
    EXPECT_THROW(cross_entropy(no_workspace(), bad), ContractError);
  };
  refuses([&](CrossEntropy& args) { args.dlogits = narrow; });
  refuses([&](CrossEntropy& args) { args.nll = nll32; });
  refuses([&](CrossEntropy& args) { args.nll = {}; });
  refuses([&](CrossEntropy& args) { args.targets = wide_targets; });
  refuses([&](CrossEntropy& args) { args.logits = dlogits; });
  refuses([&](CrossEntropy& args) { args.dlogits = TensorView(logits.view().data(), DType::bf16, {4, 8}); });
  double result = 0.0;
  EXPECT_THROW(add_sum(no_workspace(), &result, nll32), ContractError);
  EXPECT_THROW(add_sum(no_workspace(), nullptr, nll), ContractError);
}

}  // namespace
}  // namespace layerstream::ops
