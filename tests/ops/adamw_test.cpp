#include "ops/adamw.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <ostream>

#include "core/error.hpp"
#include "core/random.hpp"
#include "tests/ops/ops_test.hpp"

namespace layerstream::ops {
namespace {

/// Parameters and their state, and the arrays' bits for comparison.
struct State {
  std::vector<bf16> hi;
  std::vector<std::int16_t> lo;
  std::vector<float> exp_avg, exp_avg_sq, gradient;

  explicit State(std::size_t n) : hi(n), lo(n), exp_avg(n), exp_avg_sq(n), gradient(n) {}

  std::size_t size() const { return hi.size(); }
  float weight(std::size_t i) const { return merge(hi[i], lo[i]); }
  void set_weight(std::size_t i, float value) {
    const SplitFloat halves = split(value);
    hi[i] = halves.hi;
    lo[i] = halves.lo;
  }
  /// Elements [begin, begin + n).
  AdamWSlice slice(std::size_t begin, std::size_t n) {
    return {hi.data() + begin,         lo.data() + begin,       exp_avg.data() + begin,
            exp_avg_sq.data() + begin, gradient.data() + begin, static_cast<std::int64_t>(n)};
  }
  AdamWSlice slice() { return slice(0, size()); }
};

std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

/// Number of elements in which weight or moments differ by a bit; NaNs count as equal if `any_nan`.
std::size_t differences(const State& a, const State& b, bool any_nan = false) {
  const auto same = [&](float x, float y) {
    return bits_of(x) == bits_of(y) || (any_nan && std::isnan(x) && std::isnan(y));
  };
  std::size_t count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool weights =
        any_nan ? same(a.weight(i), b.weight(i)) : a.hi[i].bits == b.hi[i].bits && a.lo[i] == b.lo[i];
    count += weights && same(a.exp_avg[i], b.exp_avg[i]) && same(a.exp_avg_sq[i], b.exp_avg_sq[i]) ? 0 : 1;
  }
  return count;
}

/// What training looks like: weights of size 0.02, gradients over many orders of magnitude.
State typical_state(std::size_t n) {
  State state(n);
  for (std::size_t i = 0; i < n; ++i) {
    state.set_weight(i, static_cast<float>(0.02 * normal_at(1, 0, i)));
    state.exp_avg[i] = static_cast<float>(0.01 * normal_at(1, 1, i));
    state.exp_avg_sq[i] = static_cast<float>(std::pow(0.01 * normal_at(1, 2, i), 2));
    state.gradient[i] = static_cast<float>(normal_at(1, 3, i) * std::pow(10.0, -12.0 * uniform_at(1, 4, i)));
  }
  return state;
}

/// Any bit pattern whatever in every array, so also every kind of NaN, infinity and subnormal.
State random_bits(std::size_t n) {
  State state(n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto word = philox(5, i, 0);
    state.hi[i].bits = static_cast<std::uint16_t>(word[0]);
    state.lo[i] = static_cast<std::int16_t>(word[0] >> 16);
    state.exp_avg[i] = std::bit_cast<float>(word[1]);
    state.exp_avg_sq[i] = std::bit_cast<float>(word[2]);
    state.gradient[i] = std::bit_cast<float>(word[3]);
  }
  return state;
}

constexpr AdamWSettings usual{.learning_rate = 1e-3, .weight_decay = 0.1, .gradient_scale = 0.7, .step = 3};

class AdamWOnTarget : public ::testing::TestWithParam<std::string> {
 protected:
  void expect_equal_to_reference(State state, const AdamWScalars& scalars, bool any_nan = false) {
    State expected = state;
    for (int step = 0; step < 3; ++step) {
      adamw_host_on(GetParam(), state.slice(), scalars);
      adamw_reference(expected.slice(), scalars);
    }
    EXPECT_EQ(differences(state, expected, any_nan), 0u);
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, AdamWOnTarget, ::testing::ValuesIn(adamw_host_targets()),
                         [](const auto& target) { return target.param; });

TEST_P(AdamWOnTarget, EqualsTheReferenceBitForBit) {
  expect_equal_to_reference(typical_state(10007), adamw_scalars(usual));
  AdamWSettings first = usual;
  first.step = 1;
  expect_equal_to_reference(typical_state(10007), adamw_scalars(first));
}

TEST_P(AdamWOnTarget, EqualsTheReferenceForEveryLengthAndTouchesNothingBeyond) {
  for (std::size_t n = 0; n <= 70; ++n) {
    for (const std::size_t begin : {0, 1, 3}) {  // also unaligned
      State state = typical_state(n + 8);
      State expected = state;
      adamw_host_on(GetParam(), state.slice(begin, n), adamw_scalars(usual));
      adamw_reference(expected.slice(begin, n), adamw_scalars(usual));
      ASSERT_EQ(differences(state, expected), 0u) << n << " elements from " << begin;
      State untouched = typical_state(n + 8);
      std::size_t changed = 0;
      for (std::size_t i = 0; i < n + 8; ++i) changed += state.exp_avg[i] != untouched.exp_avg[i] ? 1 : 0;
      ASSERT_LE(changed, n);
      for (std::size_t i = begin + n; i < n + 8; ++i) ASSERT_EQ(state.exp_avg[i], untouched.exp_avg[i]);
    }
  }
}

TEST_P(AdamWOnTarget, EqualsTheReferenceForAllPairsOfExtremeNumbers) {
  using Limits = std::numeric_limits<float>;
  const float infinity = Limits::infinity();
  const std::vector<float> extremes{0.0f,
                                    -0.0f,
                                    Limits::denorm_min(),
                                    -Limits::denorm_min(),
                                    1e-40f,
                                    -3e-39f,
                                    Limits::min(),
                                    1e-20f,
                                    -1e-8f,
                                    1.0f,
                                    -1.0f,
                                    3e19f,
                                    -1e30f,
                                    Limits::max(),
                                    -Limits::max(),
                                    infinity,
                                    -infinity};
  const std::size_t k = extremes.size();
  State state(k * k * k * k);
  for (std::size_t i = 0; i < state.size(); ++i) {
    state.set_weight(i, extremes[i % k]);
    state.exp_avg[i] = extremes[i / k % k];
    state.exp_avg_sq[i] = std::fabs(extremes[i / k / k % k]);
    state.gradient[i] = extremes[i / k / k / k];
  }
  // One step: NaNs made here come out of one operation each, with the machine's one default payload.
  State expected = state;
  adamw_host_on(GetParam(), state.slice(), adamw_scalars(usual));
  adamw_reference(expected.slice(), adamw_scalars(usual));
  EXPECT_EQ(differences(state, expected), 0u);
}

TEST_P(AdamWOnTarget, EqualsTheReferenceForArbitraryBitsUpToTheKindOfNan) {
  expect_equal_to_reference(random_bits(100003), adamw_scalars(usual), true);
}

TEST_P(AdamWOnTarget, ANanGradientPoisonsItsOwnElementOnly) {
  State state = typical_state(100);
  State clean = state;
  state.gradient[37] = std::numeric_limits<float>::quiet_NaN();
  adamw_host_on(GetParam(), state.slice(), adamw_scalars(usual));
  adamw_host_on(GetParam(), clean.slice(), adamw_scalars(usual));
  EXPECT_EQ(differences(state, clean), 1u);
  EXPECT_TRUE(std::isnan(state.weight(37)) && std::isnan(state.exp_avg[37]) &&
              std::isnan(state.exp_avg_sq[37]));
}

TEST_P(AdamWOnTarget, SplitsAndMergesEveryHighHalfAsTheScalarCodeDoes) {
  // With gradient, moments and decay zero the step adds 0 to the weight: what is stored is split(merge(·)).
  State state(std::size_t{6} << 16);
  const std::array<std::uint16_t, 6> edges{0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff};
  for (std::size_t i = 0; i < state.size(); ++i) {
    state.hi[i].bits = static_cast<std::uint16_t>(i / 6);
    state.lo[i] = static_cast<std::int16_t>(edges[i % 6]);
  }
  const State before = state;
  AdamWSettings settings = usual;
  settings.weight_decay = 0.0;
  adamw_host_on(GetParam(), state.slice(), adamw_scalars(settings));
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < state.size(); ++i) {
    const float weight = before.weight(i);
    if (std::isnan(weight) || weight == 0.0f || std::isinf(weight)) continue;  // quietened, or of no sign
    const SplitFloat halves = split(weight);
    wrong += halves.hi.bits == state.hi[i].bits && halves.lo == state.lo[i] ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0u);
}

TEST(AdamW, RunsOnTheBestInstructionSetAndTheScalarOneIsAlwaysThere) {
  const std::vector<std::string> targets = adamw_host_targets();
  EXPECT_EQ(adamw_host_target(), targets.front());
  EXPECT_EQ(targets.back(), "scalar");
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
  EXPECT_THAT(targets, ::testing::ElementsAre("AVX3", "AVX2", "scalar"));
#elif defined(__AVX2__) && defined(__FMA__)
  EXPECT_THAT(targets, ::testing::Contains("AVX2"));
#elif defined(__aarch64__)
  EXPECT_THAT(targets, ::testing::Contains("NEON"));
#endif
  State state = typical_state(1001);
  State expected = state;
  adamw_host(state.slice(), adamw_scalars(usual));
  adamw_reference(expected.slice(), adamw_scalars(usual));
  EXPECT_EQ(differences(state, expected), 0u);
}

TEST(AdamW, RefusesAnUnknownInstructionSetAndAStepBeforeTheFirst) {
  State state(1);
  EXPECT_THROW(adamw_host_on("MMX", state.slice(), adamw_scalars(usual)), ContractError);
  EXPECT_THROW(adamw_host({nullptr, nullptr, nullptr, nullptr, nullptr, -1}, adamw_scalars(usual)),
               ContractError);
  EXPECT_THROW(adamw_scalars({.step = 0}), ContractError);
}

/// Copies of a state's arrays that a device can work on.
class OnDevice {
 public:
  explicit OnDevice(const State& state)
      : hi_(copy(state.hi, DType::bf16)),
        lo_(copy(state.lo, DType::i16)),
        exp_avg_(copy(state.exp_avg, DType::f32)),
        exp_avg_sq_(copy(state.exp_avg_sq, DType::f32)),
        gradient_(copy(state.gradient, DType::f32)) {}

  AdamWSlice slice(std::int64_t begin, std::int64_t n) {
    return {hi_.view().as<bf16>() + begin,        lo_.view().as<std::int16_t>() + begin,
            exp_avg_.view().as<float>() + begin,  exp_avg_sq_.view().as<float>() + begin,
            gradient_.view().as<float>() + begin, n};
  }
  State state() const {
    State result(static_cast<std::size_t>(hi_.numel()));
    std::copy_n(hi_.as<bf16>(), result.size(), result.hi.begin());
    std::copy_n(lo_.as<std::int16_t>(), result.size(), result.lo.begin());
    std::copy_n(exp_avg_.as<float>(), result.size(), result.exp_avg.begin());
    std::copy_n(exp_avg_sq_.as<float>(), result.size(), result.exp_avg_sq.begin());
    std::copy_n(gradient_.as<float>(), result.size(), result.gradient.begin());
    return result;
  }

 private:
  template <class T>
  static test::OwnedTensor copy(const std::vector<T>& values, DType dtype) {
    test::OwnedTensor tensor(dtype, {static_cast<std::int64_t>(values.size())});
    std::copy(values.begin(), values.end(), tensor.as<T>());
    return tensor;
  }

  test::OwnedTensor hi_, lo_, exp_avg_, exp_avg_sq_, gradient_;
};

constexpr AdamWSettings not_decayed{.learning_rate = 1e-3, .gradient_scale = 0.7, .step = 3};

/// Runs adamw_device and, on the two parts of the slice, adamw_reference; the number of elements that differ.
std::size_t device_differences(State state, std::size_t begin, std::size_t n, std::size_t num_matrix,
                               bool any_nan = false) {
  OnDevice device(state);
  for (int step = 0; step < (any_nan ? 1 : 3); ++step) {
    adamw_device(test::no_workspace(),
                 device.slice(static_cast<std::int64_t>(begin), static_cast<std::int64_t>(n)),
                 static_cast<std::int64_t>(num_matrix), adamw_scalars(usual), adamw_scalars(not_decayed));
    adamw_reference(state.slice(begin, num_matrix), adamw_scalars(usual));
    adamw_reference(state.slice(begin + num_matrix, n - num_matrix), adamw_scalars(not_decayed));
  }
  return differences(device.state(), state, any_nan);
}

TEST(AdamWDevice, EqualsTheReferenceBitForBitWhereverTheMatricesEnd) {
  const State state = typical_state(10007);
  for (const std::size_t num_matrix : {0, 1, 8, 4099, 10006, 10007}) {
    EXPECT_EQ(device_differences(state, 0, state.size(), num_matrix), 0u) << num_matrix;
  }
}

TEST(AdamWDevice, EqualsTheReferenceForEveryLengthAndAlignmentAndTouchesNothingBeyond) {
  for (std::size_t n = 0; n <= 40; ++n) {
    for (const std::size_t begin : {0, 1, 8}) {
      ASSERT_EQ(device_differences(typical_state(n + 16), begin, n, n / 2), 0u) << n << " from " << begin;
    }
  }
}

TEST(AdamWDevice, EqualsTheReferenceForArbitraryBitsUpToTheKindOfNan) {
  // Also every kind of subnormal, infinity and zero.
  EXPECT_EQ(device_differences(random_bits(100003), 0, 100003, 50001, true), 0u);
  State extremes(1 << 16);
  for (std::size_t i = 0; i < extremes.size(); ++i) {
    const auto word = philox(7, i, 0);
    const auto tiny = [](std::uint32_t bits) { return std::bit_cast<float>(bits & 0x80ffffffu); };
    extremes.set_weight(i, tiny(word[0]));
    extremes.exp_avg[i] = tiny(word[1]);
    extremes.exp_avg_sq[i] = std::fabs(tiny(word[2]));
    extremes.gradient[i] = tiny(word[3]);
  }
  EXPECT_EQ(device_differences(extremes, 0, extremes.size(), extremes.size() / 2), 0u);
}

TEST(AdamWDevice, RefusesMoreMatrixElementsThanThereAre) {
  OnDevice device(typical_state(16));
  const AdamWScalars scalars = adamw_scalars(usual);
  EXPECT_THROW(adamw_device(test::no_workspace(), device.slice(0, 16), 17, scalars, scalars), ContractError);
  EXPECT_THROW(adamw_device(test::no_workspace(), device.slice(0, 16), -1, scalars, scalars), ContractError);
}

/// Loshchilov & Hutter (2019), algorithm 2, in FP64 throughout.
struct DoubleAdamW {
  AdamWSettings settings;
  std::vector<double> weight, exp_avg, exp_avg_sq;

  DoubleAdamW(const AdamWSettings& s, const State& state)
      : settings(s), weight(state.size()), exp_avg(state.size()), exp_avg_sq(state.size()) {
    for (std::size_t i = 0; i < state.size(); ++i) weight[i] = state.weight(i);
  }

  void step(std::int64_t t, const std::vector<float>& gradient) {
    const double correction1 = 1.0 - std::pow(settings.beta1, t);
    const double correction2 = 1.0 - std::pow(settings.beta2, t);
    for (std::size_t i = 0; i < weight.size(); ++i) {
      const double g = settings.gradient_scale * static_cast<double>(gradient[i]);
      exp_avg[i] = settings.beta1 * exp_avg[i] + (1.0 - settings.beta1) * g;
      exp_avg_sq[i] = settings.beta2 * exp_avg_sq[i] + (1.0 - settings.beta2) * g * g;
      const double update =
          exp_avg[i] / correction1 / (std::sqrt(exp_avg_sq[i] / correction2) + settings.eps);
      weight[i] -= settings.learning_rate * (settings.weight_decay * weight[i] + update);
    }
  }
};

struct LongRun {
  double learning_rate, weight_decay, mean_gradient;

  friend std::ostream& operator<<(std::ostream& out, const LongRun& run) {
    return out << "learning rate " << run.learning_rate << ", decay " << run.weight_decay
               << ", mean gradient " << run.mean_gradient;
  }
};
class AdamWAfter1000Steps : public ::testing::TestWithParam<LongRun> {};
INSTANTIATE_TEST_SUITE_P(Runs, AdamWAfter1000Steps,
                         ::testing::Values(LongRun{1e-3, 0.0, 0.0}, LongRun{1e-3, 0.1, 1.0},
                                           LongRun{1e-4, 0.01, 1.0}, LongRun{1e-4, 0.1, 0.0},
                                           LongRun{1e-5, 0.0, 1.0}, LongRun{1e-5, 0.01, 0.0},
                                           LongRun{1e-5, 0.1, 1.0}, LongRun{1e-6, 0.01, 0.0}));

TEST_P(AdamWAfter1000Steps, WeightsAreWithin1em6OfDoublePrecision) {
  const auto [learning_rate, weight_decay, mean_gradient] = GetParam();
  AdamWSettings settings{.learning_rate = learning_rate, .weight_decay = weight_decay, .gradient_scale = 0.5};
  constexpr std::size_t n = 2048;
  State state(n);
  for (std::size_t i = 0; i < n; ++i) state.set_weight(i, static_cast<float>(0.02 * normal_at(3, 0, i)));
  DoubleAdamW exact(settings, state);
  for (std::int64_t t = 1; t <= 1000; ++t) {
    for (std::size_t i = 0; i < n; ++i) {
      const double mean = mean_gradient * normal_at(3, 1, i);
      state.gradient[i] = static_cast<float>(0.01 * (mean + normal_at(4, static_cast<std::uint64_t>(t), i)));
    }
    settings.step = t;
    adamw_host(state.slice(), adamw_scalars(settings));
    exact.step(t, state.gradient);
  }
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    error += std::pow(static_cast<double>(state.weight(i)) - exact.weight[i], 2);
    size += std::pow(exact.weight[i], 2);
  }
  // One rounding of the weight per step, as noise: 1,000 of at most 2^-24/sqrt(3) each add up to 1.1e-6 at
  // worst, to 0.8e-6 over the mantissas there are. The contract says 1e-6.
  EXPECT_LT(std::sqrt(error / size), 1e-6);
}

TEST(AdamW, SmallUpdatesReachTheMasterWhereABf16MasterWouldNotMove) {
  AdamWSettings settings{.learning_rate = 1e-5};
  constexpr std::size_t n = 64;
  State state(n);
  for (std::size_t i = 0; i < n; ++i) state.set_weight(i, 1.0f);
  DoubleAdamW exact(settings, state);
  State stuck = state;  // after each step its weight is rounded to bf16
  for (std::int64_t t = 1; t <= 100; ++t) {
    settings.step = t;
    for (std::size_t i = 0; i < n; ++i) {
      state.gradient[i] = static_cast<float>(1.0 + 0.3 * normal_at(6, static_cast<std::uint64_t>(t), i));
    }
    stuck.gradient = state.gradient;
    adamw_host(state.slice(), adamw_scalars(settings));
    adamw_host(stuck.slice(), adamw_scalars(settings));
    std::fill(stuck.lo.begin(), stuck.lo.end(), std::int16_t{0});
    exact.step(t, state.gradient);
  }
  for (std::size_t i = 0; i < n; ++i) {
    // 100 roundings of 2^-25 at most, as noise: 1.7e-7 in the root mean square; a constant gradient, whose
    // steps all round alike, would be 1.4e-6 off in any FP32.
    EXPECT_NEAR(state.weight(i), exact.weight[i], 1e-6);
    EXPECT_NEAR(exact.weight[i], 1.0 - 100 * 1e-5, 1e-4);
    EXPECT_EQ(stuck.weight(i), 1.0f);
  }
}

TEST(AdamW, DecayBelowHalfAnUlpPerStepStillArrives) {
  // lr·wd = 1e-8 is less than 2^-25: rounded by itself it would be lost in every step. The updates' noise,
  // with which it is rounded, carries it on average.
  const AdamWSettings decayed{.learning_rate = 1e-6, .weight_decay = 0.01};
  const AdamWSettings plain{.learning_rate = 1e-6};
  constexpr std::size_t n = 4096;
  State with(n);
  for (std::size_t i = 0; i < n; ++i) with.set_weight(i, 1.0f + static_cast<float>(uniform_at(8, 0, i)));
  State without = with;
  double expected = 0.0, found = 0.0;
  for (std::size_t i = 0; i < n; ++i) expected += with.weight(i) * 1e-8 * 500;
  for (std::int64_t t = 1; t <= 500; ++t) {
    for (std::size_t i = 0; i < n; ++i) {
      with.gradient[i] = static_cast<float>(normal_at(9, static_cast<std::uint64_t>(t), i));
    }
    without.gradient = with.gradient;
    AdamWSettings settings = decayed;
    settings.step = t;
    adamw_host(with.slice(), adamw_scalars(settings));
    settings.weight_decay = plain.weight_decay;
    adamw_host(without.slice(), adamw_scalars(settings));
  }
  for (std::size_t i = 0; i < n; ++i) found += static_cast<double>(without.weight(i)) - with.weight(i);
  // n·500 roundings of an ulp of 2^-23 in each run: sqrt(2·n·500)·2^-23/sqrt(12) = 7e-5, of 3.1e-2.
  EXPECT_NEAR(found / expected, 1.0, 0.02);
}

}  // namespace
}  // namespace layerstream::ops
