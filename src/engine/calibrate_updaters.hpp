#pragma once

#include <cstddef>
#include <span>

#include "backends/device.hpp"
#include "core/worker_pool.hpp"
#include "ops/libraries.hpp"

namespace layerstream {

/// AdamW in the two places where it runs in training, parameters a second.
struct UpdaterRates {
  double device_alone = 0.0;        ///< state staged through a ring of slots, gradients on the device
  double host = 0.0, device = 0.0;  ///< both at once, each on its own parameters
};

/// Runs them through the executor, as a step does.
/// @param on_device device memory. @param host pinned: one half is the host updater's. Contents are lost.
/// @param host_rate, @param device_rate what to expect of both at once, so that they end together.
UpdaterRates measure_updaters(Device& device, WorkerPool& pool, ops::Libraries& libraries,
                              std::span<std::byte> on_device, std::span<std::byte> host, double host_rate,
                              double device_rate, double budget);

}  // namespace layerstream
