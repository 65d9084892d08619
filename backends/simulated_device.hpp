#pragma once

#include <atomic>

#include "backends/device.hpp"

namespace layerstream {

/// The device of a CPU build: host memory under a byte limit of its own, kernels on the host's execution
/// space. Every path of the engine runs on it.
class SimulatedDevice final : public Device {
 public:
  explicit SimulatedDevice(std::size_t memory_limit) : memory_limit_(memory_limit) {}

  std::string description() const override;
  std::size_t memory_limit() const override { return memory_limit_; }
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override;
  bool uses_host_memory() const override { return true; }
  StreamView stream(Lane) override { return StreamView::host(); }
  Link& link() override { return link_; }
  std::unique_ptr<Event> make_event() override;
  void synchronize() override {}
  void poison(void* data, std::size_t bytes, StreamView stream) override;

 private:
  std::size_t memory_limit_;
  MemcpyLink link_;
  std::atomic<std::size_t> used_{0};
};

}  // namespace layerstream
