#include <gtest/gtest.h>

#include "ops/runtime.hpp"
#include "tests/support/shared_libraries.hpp"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const layerstream::ops::Runtime runtime;
  const layerstream::test::SharedLibraries libraries;
  return RUN_ALL_TESTS();
}
