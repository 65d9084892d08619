#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "ops/context.hpp"
#include "ops/embedding.hpp"
#include "tests/support/random_tensor.hpp"
#include "tests/support/shared_libraries.hpp"

namespace layerstream::test {

/// Unit roundoffs: the largest relative error of one rounding.
inline constexpr double fp32_roundoff = 0x1p-24;
inline constexpr double bf16_roundoff = 0x1p-8;

/// A context on the default stream with a poisoned workspace of exactly `bytes`.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : memory_(DType::u8, {static_cast<std::int64_t>(bytes)}) {}
  operator ops::Context() {  // NOLINT(google-explicit-constructor)
    return {StreamView::host(), memory_.view().data(), memory_.bytes(), shared_libraries()};
  }

 private:
  OwnedTensor memory_;
};

inline ops::Context no_workspace() {
  return {StreamView::host(), nullptr, 0, shared_libraries()};
}

/// tokens_by_id of a tensor of ids.
inline OwnedTensor by_id(const OwnedTensor& ids) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(ids.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::int32_t>(ids[static_cast<std::int64_t>(i)]);
  }
  OwnedTensor result(DType::i32, {ids.numel(), 4});
  std::ranges::copy(ops::tokens_by_id(values), result.as<std::int32_t>());
  return result;
}

/// Expects |actual − expected| <= bound(i) at every element i; a NaN anywhere fails.
template <class Bound>
void expect_within(const OwnedTensor& actual_, const OwnedTensor& expected_, Bound&& bound) {
  const OwnedTensor actual = actual_,
                    expected = expected_;  // copies need not wait for the device at each element
  ASSERT_EQ(actual.shape(), expected.shape());
  for (std::int64_t i = 0; i < actual.numel(); ++i) {
    const double error = std::fabs(actual[i] - expected[i]);
    ASSERT_TRUE(error <= bound(i)) << "element " << i << ": " << actual[i] << ", expected " << expected[i]
                                   << " within " << bound(i);
  }
}

/// Expects the numbers of two tensors, maybe of different dtypes, to be equal; a NaN anywhere fails.
inline void expect_equal(const OwnedTensor& actual, const OwnedTensor& expected) {
  expect_within(actual, expected, [](std::int64_t) { return 0.0; });
}

}  // namespace layerstream::test
