#include "core/random.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace layerstream {
namespace {

using Word = std::array<std::uint32_t, 4>;

// Known answers of philox4x32-10: kat_vectors of the Random123 library.
TEST(Philox, GivesTheKnownAnswersOfRandom123) {
  EXPECT_EQ(philox(0, 0, 0), (Word{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull), (Word{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (Word{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, UniformNumbersFillTheUnitIntervalEvenly) {
  constexpr int n = 100000;
  std::array<int, 10> bins{};
  for (std::uint64_t i = 0; i < n; ++i) {
    const double u = uniform_at(7, 3, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    ++bins[static_cast<std::size_t>(u * 10.0)];
  }
  // Six standard deviations of a binomial count: 6·sqrt(n·0.1·0.9) = 569.
  for (const int count : bins) EXPECT_NEAR(count, n / 10, 569);
}

TEST(Random, NormalNumbersHaveTheMomentsOfTheStandardNormal) {
  constexpr int n = 200000;
  double sum = 0.0, squares = 0.0, fourths = 0.0;
  for (std::uint64_t i = 0; i < n; ++i) {
    const double z = normal_at(7, 3, i);
    sum += z;
    squares += z * z;
    fourths += z * z * z * z;
  }
  // Six standard errors: sqrt(1/n), sqrt(2/n) and sqrt(96/n).
  EXPECT_NEAR(sum / n, 0.0, 6.0 * std::sqrt(1.0 / n));
  EXPECT_NEAR(squares / n, 1.0, 6.0 * std::sqrt(2.0 / n));
  EXPECT_NEAR(fourths / n, 3.0, 6.0 * std::sqrt(96.0 / n));
}

/// Box-Muller, one number at a time: computing the two together must not change a bit of either.
TEST(Random, PairsAreTheBitsOfTheirTwoNumbers) {
  const auto unit = [](std::uint32_t high, std::uint32_t low) {
    return static_cast<double>(((static_cast<std::uint64_t>(high) << 32) | low) >> 11) * 0x1.0p-53;
  };
  for (std::uint64_t pair = 0; pair < 10000; ++pair) {
    const auto word = philox(5, pair, 2);
    const double radius = std::sqrt(-2.0 * std::log1p(-unit(word[0], word[1])));
    volatile double angle = 2.0 * std::numbers::pi * unit(word[2], word[3]);
    const auto numbers = normal_pair_at(5, 2, pair);
    EXPECT_EQ(numbers[0], radius * std::cos(angle));
    EXPECT_EQ(numbers[1], radius * std::sin(angle));
    EXPECT_EQ(numbers[0], normal_at(5, 2, 2 * pair));
    EXPECT_EQ(numbers[1], normal_at(5, 2, 2 * pair + 1));
  }
}

TEST(Random, NeighbouringNumbersAndStreamsAreUncorrelated) {
  constexpr int n = 100000;
  double pair = 0.0, next = 0.0, streams = 0.0, seeds = 0.0;
  for (std::uint64_t i = 0; i < n; ++i) {
    pair += normal_at(1, 1, 2 * i) * normal_at(1, 1, 2 * i + 1);  // the two of one Box-Muller pair
    next += normal_at(1, 1, 2 * i + 1) * normal_at(1, 1, 2 * i + 2);
    streams += normal_at(1, 1, i) * normal_at(1, 2, i);
    seeds += normal_at(1, 1, i) * normal_at(2, 1, i);
  }
  const double six_standard_errors = 6.0 / std::sqrt(n);
  EXPECT_NEAR(pair / n, 0.0, six_standard_errors);
  EXPECT_NEAR(next / n, 0.0, six_standard_errors);
  EXPECT_NEAR(streams / n, 0.0, six_standard_errors);
  EXPECT_NEAR(seeds / n, 0.0, six_standard_errors);
}

}  // namespace
}  // namespace layerstream
