#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <optional>

#include "backends/cuda/cuda_link.hpp"
#include "backends/cuda/kernel_link.hpp"
#include "backends/device.hpp"

namespace layerstream {

/// The process's first visible CUDA GPU.
class CudaDevice final : public Device {
 public:
  /// @param memory_limit bytes that may be allocated, overhead included; never more than what is free now.
  /// Throws ResourceError without a driver or a GPU, saying which and what to do.
  explicit CudaDevice(std::optional<std::size_t> memory_limit);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  std::string description() const override;
  std::size_t memory_limit() const override { return memory_limit_; }
  std::size_t total_memory() const override { return properties_.totalGlobalMem; }
  std::size_t attainable_memory() const override;
  void set_memory_limit(std::size_t bytes) override { memory_limit_ = bytes; }
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override;
  bool uses_host_memory() const override { return false; }
  DeviceCapabilities capabilities() const override { return capabilities_; }
  std::vector<std::pair<std::string, std::int64_t>> attributes() const override;
  std::size_t overhead_bytes() const override { return gpu_overhead_bytes; }
  std::size_t used_bytes() const override;
  std::unique_ptr<HostPin> pin(void* data, std::size_t bytes, bool required,
                               const std::function<void(std::size_t, std::size_t)>& progress) override;
  StreamView stream(Lane lane) override;
  Link& link() override { return *link_; }
  Link& kernel_link() override { return kernel_link_; }
  std::unique_ptr<Event> make_event() override;
  std::unique_ptr<DeviceClock> make_clock() override;
  bool is_lost() const override;
  void synchronize() override;
  void poison(void* data, std::size_t bytes, StreamView stream) override;
  void set_profiled(bool profiled) noexcept override;

 private:
  cudaDeviceProp properties_{};
  DeviceCapabilities capabilities_;
  std::size_t memory_limit_ = 0;
  std::atomic<std::size_t> used_{0};
  std::array<cudaStream_t, all_lanes.size()> streams_{};
  std::optional<CudaLink> link_;  ///< made when the capabilities are known
  KernelLink kernel_link_;
};

}  // namespace layerstream
