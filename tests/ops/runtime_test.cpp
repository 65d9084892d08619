#include "ops/runtime.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace layerstream::ops {
namespace {

using ::testing::HasSubstr;

// Seen with OpenBLAS 0.3.21 on a 4th generation Xeon: Prescott kernels, a quarter of the speed.
TEST(BlasCore, KernelsBelowTheCpuAreWarnedAboutWithTheRemedy) {
  EXPECT_THAT(blas_core_warning("Prescott", true, true), HasSubstr("OPENBLAS_CORETYPE=SKYLAKEX"));
  EXPECT_THAT(blas_core_warning("Nehalem", true, false), HasSubstr("OPENBLAS_CORETYPE=HASWELL"));
}

TEST(BlasCore, KernelsThatFitTheCpuAreNot) {
  EXPECT_EQ(blas_core_warning("SkylakeX", true, true), "");
  EXPECT_EQ(blas_core_warning("Haswell", true, true), "");
  EXPECT_EQ(blas_core_warning("Zen", true, false), "");
  EXPECT_EQ(blas_core_warning("Prescott", false, false), "");
  EXPECT_EQ(blas_core_warning("neoversev2", false, false), "");
}

}  // namespace
}  // namespace layerstream::ops
