#include "ops/runtime.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <Kokkos_Core.hpp>
#include <algorithm>

#include "core/cuda_error.hpp"

namespace layerstream::ops {
namespace {

/// What CUDA calls the device that kernels run on.
constexpr int device_index = 0;

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// The lowest compute capability that kernels were compiled for, as 10 · major + minor.
constexpr int compiled_capability() {
  constexpr int architectures[] = {__CUDA_ARCH_LIST__};
  return *std::min_element(std::begin(architectures), std::end(architectures)) / 10;
}

/// Kokkos would abort the program where this throws.
/// @throws ResourceError if there is no driver or no GPU, if the driver is too old, or if the GPU cannot run
/// the compiled kernels.
void expect_usable_device() {
  constexpr const char* remedy = "or use the CPU build (LAYERSTREAM_ENABLE_CUDA=OFF), which needs neither";
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    const std::string found = driver == 0 ? std::string("no driver was found")
                                          : fmt::format("the driver supports CUDA {}", version_text(driver));
    throw ResourceError(fmt::format(
        "this is a CUDA build and there is no usable GPU: cudaGetDeviceCount says \"{}\" ({}); {}, this build needs "
        "CUDA {}. Install or update the NVIDIA driver, check nvidia-smi and CUDA_VISIBLE_DEVICES, {}",
        status == cudaSuccess ? "no devices" : cudaGetErrorString(status), cudaGetErrorName(status), found,
        version_text(CUDART_VERSION), remedy));
  }
  cudaDeviceProp properties{};
  LAYERSTREAM_CUDA(cudaGetDeviceProperties(&properties, device_index));
  const int capability = 10 * properties.major + properties.minor;
  if (capability < compiled_capability()) {
    throw ResourceError(fmt::format(
        "the GPU {} has compute capability {}.{}, and this build is for {}.{} or newer. Build again "
        "with CMAKE_CUDA_ARCHITECTURES={} and a Kokkos for that architecture, {}",
        properties.name, properties.major, properties.minor, compiled_capability() / 10,
        compiled_capability() % 10, capability, remedy));
  }
}

Kokkos::InitializationSettings settings() {
  expect_usable_device();
  // Kokkos' advice on OMP_PROC_BIND does not fit: the optimizer's threads share the CPUs with its own.
  return Kokkos::InitializationSettings().set_disable_warnings(true).set_device_id(device_index);
}

}  // namespace

struct Runtime::Guard {
  Kokkos::ScopeGuard kokkos{settings()};
};

Runtime::Runtime() : guard_(std::make_unique<Guard>()) {}
Runtime::~Runtime() = default;

std::string Runtime::description() const {
  cudaDeviceProp properties{};
  LAYERSTREAM_CUDA(cudaGetDeviceProperties(&properties, device_index));
  int driver = 0;
  LAYERSTREAM_CUDA(cudaDriverGetVersion(&driver));
  return fmt::format(
      "Kokkos {} on {} (compute capability {}.{}, {} multiprocessors, {:.1f} GiB), CUDA {}, driver for CUDA {}",
      Kokkos::DefaultExecutionSpace::name(), properties.name, properties.major, properties.minor,
      properties.multiProcessorCount,
      static_cast<double>(properties.totalGlobalMem) / (1024.0 * 1024.0 * 1024.0),
      version_text(CUDART_VERSION), version_text(driver));
}

std::vector<std::string> Runtime::warnings() const {
  return {};
}

}  // namespace layerstream::ops
