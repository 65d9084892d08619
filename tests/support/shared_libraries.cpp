#include "tests/support/shared_libraries.hpp"

namespace layerstream::test {
namespace {

ops::Libraries* current = nullptr;

}  // namespace

SharedLibraries::SharedLibraries() {
  current = &libraries_;
}

SharedLibraries::~SharedLibraries() {
  current = nullptr;
}

ops::Libraries* shared_libraries() {
  return current;
}

}  // namespace layerstream::test
