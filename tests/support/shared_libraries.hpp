#pragma once

#include "ops/libraries.hpp"

namespace layerstream::test {

/// Makes the libraries that all tests of a program share. One object, in main, between the start and the end
/// of the kernels' runtime.
class SharedLibraries {
 public:
  SharedLibraries();
  ~SharedLibraries();
  SharedLibraries(const SharedLibraries&) = delete;
  SharedLibraries& operator=(const SharedLibraries&) = delete;

 private:
  ops::Libraries libraries_;
};

/// Those of the living SharedLibraries, for a Context. @pre there is one
ops::Libraries* shared_libraries();

}  // namespace layerstream::test
