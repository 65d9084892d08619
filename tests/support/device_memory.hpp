#pragma once

#include <cstddef>

/// Memory that tests fill and read and that kernels work on: ordinary memory in a CPU build
/// (device_memory_host.cpp), pinned host memory in a CUDA build (device_memory_cuda.cpp).
namespace layerstream::test {

/// At least `bytes`, 256-byte aligned. @throws std::bad_alloc, or CudaError in a CUDA build.
void* allocate_for_device(std::size_t bytes);

/// @param memory from allocate_for_device(bytes), or null. In a CUDA build it first waits for the device,
/// which may still be using it.
void free_for_device(void* memory, std::size_t bytes) noexcept;

/// Returns when all work given to the device is done; at once in a CPU build.
/// @throws CudaError in a CUDA build, also for an error of earlier work.
void wait_for_device();

}  // namespace layerstream::test
