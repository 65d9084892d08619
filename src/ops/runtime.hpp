#pragma once

#include <memory>
#include <string>

namespace layerstream::ops {

/// Starts what the kernels run on (Kokkos) and ends it again. One object, alive in main for as long as
/// any function of ops/ is called.
class Runtime {
 public:
  /// The number of threads of a CPU build follows OMP_NUM_THREADS, else the affinity mask.
  Runtime();
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// For the banner: execution space and concurrency.
  std::string description() const;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

}  // namespace layerstream::ops
