#pragma once

#include <string>

#include "backends/device.hpp"

namespace layerstream {

/// How much of a device's memory others hold.
struct FreeDeviceMemory {
  std::size_t free = 0;
  std::size_t total = 0;

  double share() const { return total == 0 ? 1.0 : static_cast<double>(free) / static_cast<double>(total); }
};

/// As the device says, its context included. @pre nothing has been allocated on it yet.
FreeDeviceMemory free_memory_of(const Device& device);

/// Says who may hold the rest, and what to do, where less than 90% of a GPU's memory is free before a run has
/// allocated anything; else empty. On Grace Hopper it may be files' pages.
std::string free_memory_warning(const Device& device);

}  // namespace layerstream
