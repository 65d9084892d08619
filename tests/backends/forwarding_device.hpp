#pragma once

#include <memory>
#include <utility>

#include "backends/simulated_device.hpp"

namespace layerstream::test {

/// A device, simulated unless it is given, for tests that watch or change single calls.
class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::size_t memory_limit)
      : ForwardingDevice(std::make_unique<SimulatedDevice>(memory_limit)) {}
  explicit ForwardingDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  std::string description() const override { return device_->description(); }
  std::size_t memory_limit() const override { return device_->memory_limit(); }
  std::size_t total_memory() const override { return device_->total_memory(); }
  std::size_t attainable_memory() const override { return device_->attainable_memory(); }
  void set_memory_limit(std::size_t bytes) override { device_->set_memory_limit(bytes); }
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override { return device_->allocate(bytes); }
  bool uses_host_memory() const override { return device_->uses_host_memory(); }
  DeviceCapabilities capabilities() const override { return device_->capabilities(); }
  std::vector<std::pair<std::string, std::int64_t>> attributes() const override {
    return device_->attributes();
  }
  std::size_t overhead_bytes() const override { return device_->overhead_bytes(); }
  std::size_t used_bytes() const override { return device_->used_bytes(); }
  std::unique_ptr<HostPin> pin(void* data, std::size_t bytes, bool required,
                               const std::function<void(std::size_t, std::size_t)>& progress) override {
    return device_->pin(data, bytes, required, progress);
  }
  StreamView stream(Lane lane) override { return device_->stream(lane); }
  Link& link() override { return device_->link(); }
  Link& kernel_link() override { return device_->kernel_link(); }
  std::unique_ptr<Event> make_event() override { return device_->make_event(); }
  std::unique_ptr<DeviceClock> make_clock() override { return device_->make_clock(); }
  bool is_lost() const override { return device_->is_lost(); }
  void synchronize() override { device_->synchronize(); }
  void poison(void* data, std::size_t bytes, StreamView stream) override {
    device_->poison(data, bytes, stream);
  }
  void set_profiled(bool profiled) noexcept override { device_->set_profiled(profiled); }

 private:
  std::unique_ptr<Device> device_;
};

}  // namespace layerstream::test
