#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "backends/link.hpp"
#include "core/event.hpp"
#include "core/lane.hpp"
#include "core/stream.hpp"

namespace layerstream {

/// Owns one region of device memory.
class DeviceRegion {
 public:
  virtual ~DeviceRegion() = default;
  virtual void* data() const = 0;
  virtual std::size_t bytes() const = 0;
};

/// The machine that computes: memory of its own and a stream for each lane.
class Device {
 public:
  virtual ~Device() = default;
  /// For the banner and for messages: "simulated device, 2.00 GiB".
  virtual std::string description() const = 0;
  /// Bytes that may be allocated in all.
  virtual std::size_t memory_limit() const = 0;
  /// Throws ResourceError past the limit, naming need and have. Memory is 256-byte aligned.
  virtual std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) = 0;
  /// Its memory is taken from the host's (simulation): a plan must find room for both there.
  virtual bool uses_host_memory() const = 0;
  virtual StreamView stream(Lane lane) = 0;
  /// Moves bytes between host and device; lives as long as the device.
  virtual Link& link() = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  /// Blocks until all streams have done what was ordered on them (between steps only).
  virtual void synchronize() = 0;
  /// Fills device memory with a byte that reads as NaN in fp32 and bf16 (diagnostics). Ordered on `stream`.
  virtual void poison(void* data, std::size_t bytes, StreamView stream) = 0;
};

}  // namespace layerstream
