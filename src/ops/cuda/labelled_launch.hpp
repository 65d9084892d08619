#pragma once

#include <cuda_runtime_api.h>

#include <Kokkos_Core.hpp>
#include <cstddef>
#include <cstdint>

#include "core/cuda_error.hpp"

/// Launches of plain CUDA kernels, for what Kokkos cannot ask for: more than 48 KiB of shared memory,
/// clusters.
namespace layerstream::ops::cuda {

struct LaunchShape {
  int blocks = 0, lanes = 0;
  std::size_t shared_bytes = 0;  ///< dynamic
  int cluster = 1;               ///< blocks that reach each other's shared memory; divides `blocks`
};

/// True if every architecture of this build has clusters.
inline constexpr bool has_clusters = [] {
  constexpr int architectures[] = {__CUDA_ARCH_LIST__};
  for (const int architecture : architectures) {
    if (architecture < 900) return false;
  }
  return true;
}();

/// Shared memory of a block, at most, on every architecture of this build (CUDA C++ Programming Guide,
/// "Technical Specifications per Compute Capability").
inline constexpr std::size_t most_shared_bytes = [] {
  constexpr int architectures[] = {__CUDA_ARCH_LIST__};
  for (const int architecture : architectures) {
    if (architecture != 900 && architecture != 1000) return std::size_t{99} << 10;
  }
  return std::size_t{227} << 10;
}();

/// kernel<<<shape>>>(argument) on the stream of `space`, announced to Kokkos' tools like Kokkos' own kernels.
/// @throws ResourceError if the device cannot run it.
template <class Argument>
void launch_labelled(const Kokkos::Cuda& space, const char* label, const LaunchShape& shape,
                     void (*kernel)(Argument), const Argument& argument) {
  if (shape.shared_bytes > 0) {
    const auto bytes = static_cast<int>(shape.shared_bytes);
    LAYERSTREAM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    LAYERSTREAM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                          cudaSharedmemCarveoutMaxShared));
  }
  const bool is_announced = Kokkos::Tools::profileLibraryLoaded();
  std::uint64_t id = 0;
  if (is_announced) {
    Kokkos::Tools::beginParallelFor(label, Kokkos::Tools::Experimental::device_id(space), &id);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.lanes));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = space.cuda_stream();
  config.attrs = &cluster;
  config.numAttrs = shape.cluster > 1 ? 1 : 0;
  LAYERSTREAM_CUDA(cudaLaunchKernelEx(&config, kernel, argument));
  if (is_announced) Kokkos::Tools::endParallelFor(id);
}

}  // namespace layerstream::ops::cuda
