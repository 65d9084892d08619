#pragma once

#include <cstddef>
#include <memory>

#ifdef LAYERSTREAM_TEST_ON_GPU
#include "backends/cuda/cuda_device.hpp"
#else
#include "backends/simulated_device.hpp"
#endif

namespace layerstream::test {

/// The device of this build, for tests that run kernels on it: the GPU in a CUDA build, a simulated device
/// otherwise. @param bytes that a test may allocate; the device's own overhead comes on top.
inline std::unique_ptr<Device> make_test_device(std::size_t bytes) {
#ifdef LAYERSTREAM_TEST_ON_GPU
  return std::make_unique<CudaDevice>(bytes + gpu_overhead_bytes);
#else
  return std::make_unique<SimulatedDevice>(bytes);
#endif
}

}  // namespace layerstream::test
