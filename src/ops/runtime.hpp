#pragma once

#include <memory>
#include <string>
#include <vector>

namespace layerstream::ops {

/// Starts what the kernels run on (Kokkos) and ends it again. One object, alive in main for as long as
/// any function of ops/ is called.
class Runtime {
 public:
  /// The number of threads of a CPU build follows OMP_NUM_THREADS, else the affinity mask. A CUDA build runs
  /// on the first GPU that CUDA_VISIBLE_DEVICES leaves.
  /// @throws ResourceError in a CUDA build without a driver or a GPU that can run its kernels.
  Runtime();
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// For the banner: execution space, and what it runs on: the concurrency and the kernels that the BLAS has
  /// chosen for this CPU, or the GPU with its driver.
  std::string description() const;

  /// What makes kernels slower than this machine can be: an OpenBLAS that does not know the CPU and has
  /// fallen back to kernels without its vector instructions, with the remedy. Empty when all is well.
  std::vector<std::string> warnings() const;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

/// CPU builds only: the warning for a BLAS that uses `core` kernels on a CPU whose widest vector set is
/// given; empty if they go together.
std::string blas_core_warning(const std::string& core, bool has_avx2, bool has_avx512);

}  // namespace layerstream::ops
