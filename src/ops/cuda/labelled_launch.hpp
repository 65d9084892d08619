#pragma once

#include <cuda_runtime_api.h>

#include <Kokkos_Core.hpp>
#include <cstddef>
#include <cstdint>

#include "core/cuda_error.hpp"

/// Launches of plain CUDA kernels, for what Kokkos cannot ask for: clusters, kernels that start while the one
/// before ends.
namespace layerstream::ops::cuda {

struct LaunchShape {
  int blocks = 0, lanes = 0;
  int cluster = 1;  ///< blocks that reach each other's shared memory; divides `blocks`
  /// The kernel may start before the one before it on the stream has ended, and calls wait_for_last.
  bool starts_early = false;
  std::size_t shared_bytes = 0;  ///< of a block, beside what the kernel declares
};

/// True if every architecture of this build has clusters.
inline constexpr bool has_clusters = [] {
  constexpr int architectures[] = {__CUDA_ARCH_LIST__};
  for (const int architecture : architectures) {
    if (architecture < 900) return false;
  }
  return true;
}();

#if defined(__CUDACC__)

/// Called by a kernel that one which starts early may follow, as soon as that one may start.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Called by a kernel that starts early, before it touches what kernels before it on the stream do.
__device__ inline void wait_for_last() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif

/// kernel<<<shape>>>(argument) on the stream of `space`, announced to Kokkos' tools like Kokkos' own kernels.
/// @throws ResourceError if the device cannot run it.
template <class Argument>
void launch_labelled(const Kokkos::Cuda& space, const char* label, const LaunchShape& shape,
                     void (*kernel)(Argument), const Argument& argument) {
  const bool is_announced = Kokkos::Tools::profileLibraryLoaded();
  std::uint64_t id = 0;
  if (is_announced) {
    Kokkos::Tools::beginParallelFor(label, Kokkos::Tools::Experimental::device_id(space), &id);
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[count++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.starts_early && has_clusters) {  // an architecture with the one has the other
    cudaLaunchAttribute& early = attributes[count++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.lanes));
  config.stream = space.cuda_stream();
  config.dynamicSmemBytes = shape.shared_bytes;
  if (shape.shared_bytes > 0) {  // with what the kernel declares it may be more than a launch has without asking
    LAYERSTREAM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shape.shared_bytes)));
  }
  config.attrs = attributes;
  config.numAttrs = count;
  LAYERSTREAM_CUDA(cudaLaunchKernelEx(&config, kernel, argument));
  if (is_announced) Kokkos::Tools::endParallelFor(id);
}

}  // namespace layerstream::ops::cuda
