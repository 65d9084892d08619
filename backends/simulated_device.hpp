#pragma once

#include <atomic>

#include "backends/device.hpp"

namespace layerstream {

/// The device of a CPU build: host memory under a byte limit of its own, kernels on the host's execution
/// space. Every path of the engine runs on it.
class SimulatedDevice final : public Device {
 public:
  explicit SimulatedDevice(std::size_t memory_limit)
      : total_memory_(memory_limit), memory_limit_(memory_limit) {}

  std::string description() const override;
  std::size_t memory_limit() const override { return memory_limit_; }
  std::size_t total_memory() const override { return total_memory_; }
  std::size_t attainable_memory() const override;
  void set_memory_limit(std::size_t bytes) override { memory_limit_ = bytes; }
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override;
  bool uses_host_memory() const override { return true; }
  DeviceCapabilities capabilities() const override { return {}; }
  std::size_t overhead_bytes() const override { return 0; }
  std::size_t used_bytes() const override { return used_; }
  std::unique_ptr<HostPin> pin(void* data, std::size_t bytes, bool required,
                               const std::function<void(std::size_t, std::size_t)>& progress) override;
  StreamView stream(Lane) override { return StreamView::host(); }
  Link& link() override { return link_; }
  std::unique_ptr<Event> make_event() override;
  std::unique_ptr<DeviceClock> make_clock() override;
  bool is_lost() const override { return false; }
  void synchronize() override {}
  void poison(void* data, std::size_t bytes, StreamView stream) override;
  void set_profiled(bool) noexcept override {}

 private:
  std::size_t total_memory_;
  std::size_t memory_limit_;
  MemcpyLink link_;
  std::atomic<std::size_t> used_{0};
};

}  // namespace layerstream
