#pragma once

#include <memory>

#include "backends/host_region.hpp"
#include "doctor/check.hpp"

namespace layerstream::doctor {

/// Host memory as a run has it, and as much device memory.
class MemoryPair {
 public:
  explicit MemoryPair(const Patient& patient)
      : device_(*patient.device),
        host_(size(patient), {.component = "doctor",
                              .numa_node = patient.host_node.node,
                              .must_bind = patient.host_node.required,
                              .pool = &patient.pool}),
        on_device_(device_.allocate(host_.bytes())) {}

  const HostRegion& host() const { return host_; }
  const DeviceRegion& on_device() const { return *on_device_; }
  std::size_t bytes() const { return host_.bytes(); }
  std::unique_ptr<HostPin> pin(bool required) const {
    return device_.pin(host_.data(), host_.bytes(), required, {});
  }

 private:
  static std::size_t size(const Patient& patient) {
    const Device& device = *patient.device;
    const std::size_t limit =
        device.memory_limit() - std::min(device.memory_limit(), device.overhead_bytes());
    return std::max<std::size_t>(std::min(patient.bytes, limit / 2), 1);
  }

  Device& device_;
  HostRegion host_;
  std::unique_ptr<DeviceRegion> on_device_;
};

}  // namespace layerstream::doctor
