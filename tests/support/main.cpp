#include <gtest/gtest.h>

#include "ops/runtime.hpp"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const layerstream::ops::Runtime runtime;
  return RUN_ALL_TESTS();
}
