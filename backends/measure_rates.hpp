#pragma once

#include <cstddef>

#include "backends/device.hpp"
#include "core/worker_pool.hpp"

namespace layerstream {

/// Bytes a second; 0: not measured.
struct MeasuredRates {
  double to_device = 0.0;
  double to_host = 0.0;
  double host_memory = 0.0;  ///< read and written
};

/// Copies `bytes` from the host to the device and the same bytes back, one direction at a time, the best of a
/// few rounds. Host memory keeps its contents, device memory does not. Blocks; tens of milliseconds for 64
/// MiB.
/// @param host_memory pinned like what later copies will use.
MeasuredRates measure_link(Device& device, void* device_memory, void* host_memory, std::size_t bytes);

/// Reads and writes back `bytes`, in place, with all threads of the pool: as the optimizer's update does,
/// equal parts of both. Contents stay. Bytes a second, both directions counted.
double measure_host_memory(WorkerPool& pool, void* memory, std::size_t bytes);

}  // namespace layerstream
