#pragma once

#include "backends/device.hpp"

namespace layerstream {

/// A GPU that is not here, for plans: what it is and how much it holds. Whatever would need the card itself
/// throws ContractError.
class DescribedDevice final : public Device {
 public:
  struct Description {
    std::string name;
    std::size_t memory_limit = 0;
    bool uses_host_memory = false;
    DeviceCapabilities capabilities;
  };
  explicit DescribedDevice(Description description)
      : description_(std::move(description)), total_memory_(description_.memory_limit) {}

  std::string description() const override { return description_.name; }
  std::size_t memory_limit() const override { return description_.memory_limit; }
  std::size_t total_memory() const override { return total_memory_; }
  std::size_t attainable_memory() const override { return description_.memory_limit; }
  void set_memory_limit(std::size_t bytes) override { description_.memory_limit = bytes; }
  bool uses_host_memory() const override { return description_.uses_host_memory; }
  DeviceCapabilities capabilities() const override { return description_.capabilities; }
  std::size_t overhead_bytes() const override {
    return description_.uses_host_memory ? 0 : gpu_overhead_bytes;
  }
  std::size_t used_bytes() const override { return 0; }
  Link& link() override { return link_; }

  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override;
  std::unique_ptr<HostPin> pin(void* data, std::size_t bytes, bool required,
                               const std::function<void(std::size_t, std::size_t)>& progress) override;
  StreamView stream(Lane lane) override;
  std::unique_ptr<Event> make_event() override;
  std::unique_ptr<DeviceClock> make_clock() override;
  bool is_lost() const override { return false; }
  void synchronize() override;
  void poison(void* data, std::size_t bytes, StreamView stream) override;
  void set_profiled(bool) noexcept override {}

 private:
  class NoLink final : public Link {
   public:
    void copy(void* to, const void* from, std::size_t bytes, StreamView stream) override;
  };

  Description description_;
  std::size_t total_memory_;
  NoLink link_;
};

}  // namespace layerstream
