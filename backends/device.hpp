#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/device_clock.hpp"
#include "backends/link.hpp"
#include "core/event.hpp"
#include "core/lane.hpp"
#include "core/stream.hpp"

namespace layerstream {

/// What a GPU holds beside its allocations: context, library handles and the code that libraries load while
/// they run. On an H200 with CUDA 13.0 plans of 14 to 137 GiB left 0.3 to 0.4 GiB of 1 GiB unused (benches/results).
inline constexpr std::size_t gpu_overhead_bytes = std::size_t{768} << 20;

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
  /// Kernels reach any host memory coherently, through the host's page tables (ATS, Grace Hopper).
  bool shares_host_page_tables = false;
  bool pageable_memory_access = false;  ///< kernels reach host memory that was not registered, in whichever way
  bool direct_managed_access_from_host = false;  ///< the host reaches managed memory on the device in place
  std::optional<int> numa_node = {};             ///< that the link ends at, as the system says
  std::optional<int> host_numa_id = {};          ///< host node closest to the device, as the driver says
  std::string pci_bus_id = {};                   ///< "0009:01:00.0"; empty: not on PCI

  /// The node that the link ends at, by whoever knows it.
  std::optional<int> link_node() const { return numa_node ? numa_node : host_numa_id; }
};

/// The machine that computes: memory of its own and a stream for each lane.
class Device {
 public:
  virtual ~Device() = default;
  /// For the banner and for messages: "simulated device, 2.00 GiB".
  virtual std::string description() const = 0;
  /// Bytes that may be allocated in all.
  virtual std::size_t memory_limit() const = 0;
  /// Bytes that it has, whatever may be allocated of them: of a simulated or described device what its limit
  /// was when it was made.
  virtual std::size_t total_memory() const = 0;
  /// The largest limit that would hold: what is allocated and what is free now, as the device itself says.
  virtual std::size_t attainable_memory() const = 0;
  /// Between steps. What is allocated stays.
  virtual void set_memory_limit(std::size_t bytes) = 0;
  /// Throws ResourceError past the limit, naming need and have. Memory is 256-byte aligned.
  virtual std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) = 0;
  /// Its memory is taken from the host's (simulation): a plan must find room for both there.
  virtual bool uses_host_memory() const = 0;
  virtual DeviceCapabilities capabilities() const = 0;
  /// What the driver says of the device, by the driver's names; for reports, not for decisions.
  virtual std::vector<std::pair<std::string, std::int64_t>> attributes() const { return {}; }
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
  /// The same by kernels, for host memory that they reach; where there are none, link().
  virtual Link& kernel_link() { return link(); }
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
