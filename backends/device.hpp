#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "backends/device_clock.hpp"
#include "backends/link.hpp"
#include "core/event.hpp"
#include "core/lane.hpp"
#include "core/stream.hpp"

namespace layerstream {

/// What a GPU holds beside its allocations: context, library handles and the code that libraries load while
/// they run. Measured on an H200 with CUDA 13.0: see benches/results.
inline constexpr std::size_t gpu_overhead_bytes = std::size_t{1} << 30;

/// Owns one region of device memory.
class DeviceRegion {
 public:
  virtual ~DeviceRegion() = default;
  virtual void* data() const = 0;
  virtual std::size_t bytes() const = 0;
};

/// Host memory that the device can copy from and to at the link's speed and without the calling thread, for
/// as long as this object lives. The memory outlives it.
class HostPin {
 public:
  virtual ~HostPin() = default;
  /// Bytes from the start of the memory that are pinned; the rest is copied through a staging ring.
  virtual std::size_t pinned_bytes() const = 0;
  /// Why not all of it is pinned; empty if it is.
  virtual std::string shortfall() const = 0;
};

/// What a device is, as far as the choice of backend depends on it.
struct DeviceCapabilities {
  bool shares_host_page_tables = false;  ///< kernels reach any host memory coherently (ATS, Grace Hopper)
  std::optional<int> numa_node;          ///< host node that the link ends at
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
  virtual DeviceCapabilities capabilities() const = 0;
  /// Device bytes that are in use before the first `allocate` and beside it: contexts, library code.
  virtual std::size_t overhead_bytes() const = 0;
  /// Device bytes that are in use now, by whomever, as the device itself says.
  virtual std::size_t used_bytes() const = 0;
  /// Host memory for copies. Throws ResourceError if `required` and not all of it can be pinned, naming what
  /// was pinned so far and the limit. @param progress as HostRegionOptions::progress.
  virtual std::unique_ptr<HostPin> pin(void* data, std::size_t bytes, bool required,
                                       const std::function<void(std::size_t, std::size_t)>& progress) = 0;
  /// Of the host lane: StreamView::host().
  virtual StreamView stream(Lane lane) = 0;
  /// Moves bytes between host and device; lives as long as the device.
  virtual Link& link() = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  /// Times marks on this device's streams; lives no longer than the device.
  virtual std::unique_ptr<DeviceClock> make_clock() = 0;
  /// True after a fault (an illegal address, a failed launch) that no later call gets over.
  virtual bool is_lost() const = 0;
  /// Blocks until all streams have done what was ordered on them (between steps only).
  virtual void synchronize() = 0;
  /// Fills device memory with a byte that reads as NaN in fp32 and bf16 (diagnostics). Ordered on `stream`.
  virtual void poison(void* data, std::size_t bytes, StreamView stream) = 0;
  /// Begins or ends the part of the run that an attached profiler is to record (nsys: -c cudaProfilerApi).
  virtual void set_profiled(bool profiled) noexcept = 0;
};

}  // namespace layerstream
