#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tests/support/random_tensor.hpp"

namespace layerstream::test {

/// Gradient of objective() with respect to element `index` of `variable` (fp64), which `objective` reads.
/// Five-point central difference: error step^4 / 30 · f⁽⁵⁾ of truncation, about 1e-16 · |f| / step of
/// rounding; both near 1e-12 for functions of order one at step 1e-3.
template <class Objective>
double finite_difference(OwnedTensor& variable, std::int64_t index, Objective&& objective,
                         double step = 1e-3) {
  double& element = variable.as<double>()[index];
  const double value = element;
  const auto at = [&](double offset) {
    element = value + offset;
    return objective();
  };
  const double near = at(step) - at(-step);
  const double far = at(2.0 * step) - at(-2.0 * step);
  element = value;
  return (8.0 * near - far) / (12.0 * step);
}

/// Expects every element of `gradient` within `tolerance` · (largest |gradient| of the tensor) of the finite
/// difference of objective().
template <class Objective>
void expect_gradient(OwnedTensor& variable, const OwnedTensor& gradient, Objective&& objective,
                     double tolerance, double step = 1e-3) {
  ASSERT_EQ(variable.numel(), gradient.numel());
  double worst = 0.0, largest = 0.0, numeric_at_worst = 0.0;
  std::int64_t where = 0;
  for (std::int64_t i = 0; i < variable.numel(); ++i) {
    const double numeric = finite_difference(variable, i, objective, step);
    const double error = std::fabs(gradient[i] - numeric);
    largest = std::max(largest, std::fabs(numeric));
    if (!(error <= worst)) {
      worst = error;
      where = i;
      numeric_at_worst = numeric;
    }
  }
  EXPECT_LE(worst, tolerance * largest) << "element " << where << ": gradient " << gradient[where]
                                        << ", finite difference " << numeric_at_worst;
}

}  // namespace layerstream::test
