#include "engine/host_optimizer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "core/error.hpp"
#include "core/random.hpp"

namespace layerstream {
namespace {

struct Slab {
  std::vector<bf16> hi;
  std::vector<std::int16_t> lo;
  std::vector<float> exp_avg, exp_avg_sq, gradient;

  explicit Slab(std::size_t n) : hi(n), lo(n), exp_avg(n), exp_avg_sq(n), gradient(n) {
    for (std::size_t i = 0; i < n; ++i) {
      const SplitFloat halves = split(static_cast<float>(1.0 + uniform_at(1, 0, i)));
      hi[i] = halves.hi;
      lo[i] = halves.lo;
      exp_avg_sq[i] = static_cast<float>(uniform_at(1, 1, i));
      exp_avg[i] = static_cast<float>(normal_at(1, 2, i));
      gradient[i] = static_cast<float>(normal_at(1, 3, i));
    }
  }

  std::size_t size() const { return hi.size(); }
  float weight(std::size_t i) const { return merge(hi[i], lo[i]); }
  ops::AdamWSlice slice() {
    return {hi.data(),         lo.data(),       exp_avg.data(),
            exp_avg_sq.data(), gradient.data(), static_cast<std::int64_t>(size())};
  }
  bool operator==(const Slab& other) const {
    for (std::size_t i = 0; i < size(); ++i) {
      if (hi[i].bits != other.hi[i].bits) return false;
    }
    return std::tie(lo, exp_avg, exp_avg_sq) == std::tie(other.lo, other.exp_avg, other.exp_avg_sq);
  }
};

/// Matrices are decayed, what comes after them is not.
std::vector<UpdateRange> ranges(std::int64_t num_matrix, std::int64_t n) {
  return {{.end = num_matrix, .weight_decay = 0.1}, {.end = n, .weight_decay = 0.0}};
}

constexpr ops::AdamWSettings settings{
    .learning_rate = 1e-2, .weight_decay = 0.1, .gradient_scale = 0.3, .step = 2};

class HostOptimizerOfPieces : public ::testing::TestWithParam<std::tuple<int, std::int64_t>> {};
INSTANTIATE_TEST_SUITE_P(ThreadsAndPieces, HostOptimizerOfPieces,
                         ::testing::Combine(::testing::Values(1, 2, 5),
                                            ::testing::Values(1000, 4096,
                                                              HostOptimizer::default_piece_elements)));

TEST_P(HostOptimizerOfPieces, EqualsTheReferenceWhateverTheThreadsAndPieces) {
  const auto [threads, piece] = GetParam();
  WorkerPool pool(threads);
  HostOptimizer optimizer(pool, piece);
  constexpr std::size_t n = 20011;
  // The border between decayed and not: before, at, inside and after pieces.
  for (const std::int64_t num_matrix : {0, 1, 4096, 5000, 20010, 20011}) {
    Slab slab(n);
    Slab expected = slab;
    optimizer.update(slab.slice(), ranges(num_matrix, n), settings);
    ops::AdamWSettings undecayed = settings;
    undecayed.weight_decay = 0.0;
    const ops::AdamWSlice all = expected.slice();
    const auto m = num_matrix;
    ops::adamw_reference({all.hi, all.lo, all.exp_avg, all.exp_avg_sq, all.gradient, m},
                         ops::adamw_scalars(settings));
    ops::adamw_reference(
        {all.hi + m, all.lo + m, all.exp_avg + m, all.exp_avg_sq + m, all.gradient + m, all.n - m},
        ops::adamw_scalars(undecayed));
    EXPECT_TRUE(slab == expected) << num_matrix << " matrix elements";
  }
}

TEST(HostOptimizer, AStepOfZeroGradientDecaysMatricesAndLeavesTheRestAsItIs) {
  WorkerPool pool(2);
  HostOptimizer optimizer(pool, 1000);
  constexpr std::size_t n = 5000, num_matrix = 3333;
  Slab slab(n);
  slab.gradient.assign(n, 0.0f);
  slab.exp_avg.assign(n, 0.0f);
  const Slab before = slab;
  optimizer.update(slab.slice(), ranges(num_matrix, n), settings);
  for (std::size_t i = 0; i < n; ++i) {
    if (i < num_matrix) {
      // lr·wd in FP32 and one rounding: 2^-24 each, the first of a number a thousandth of the weight.
      const double expected = static_cast<double>(before.weight(i)) * (1.0 - 1e-3);
      ASSERT_NEAR(slab.weight(i), expected, expected * 6.1e-8) << i;
    } else {
      ASSERT_EQ(slab.weight(i), before.weight(i)) << i;
    }
  }
}

TEST(HostOptimizer, AnEmptySlabIsNoWork) {
  WorkerPool pool(2);
  HostOptimizer optimizer(pool);
  Slab slab(0);
  EXPECT_NO_THROW(optimizer.update(slab.slice(), {}, settings));
  EXPECT_NO_THROW(optimizer.update(slab.slice(), settings));
}

TEST(HostOptimizer, RefusesDecaysOfAnotherSlabAndPiecesOfNothing) {
  WorkerPool pool(1);
  HostOptimizer optimizer(pool);
  Slab slab(10);
  EXPECT_THROW(optimizer.update(slab.slice(), ranges(11, 10), settings), ContractError);
  EXPECT_THROW(optimizer.update(slab.slice(), ranges(5, 9), settings), ContractError);
  EXPECT_THROW(optimizer.update(slab.slice(), {}, settings), ContractError);
  EXPECT_THROW(HostOptimizer(pool, 0), ContractError);
}

}  // namespace
}  // namespace layerstream
