#pragma once

#include <cstddef>
#include <string>

#include "backends/described_device.hpp"
#include "engine/planner.hpp"

namespace layerstream {

/// The device of a profile under the run's device_memory_limit.
DescribedDevice described_device(const HardwareProfile& profile, const RunConfig& config);
/// What the profile's host has for this process, under the run's host_memory_limit.
HostBudget described_host(const HardwareProfile& profile, const RunConfig& config);

/// The run on each shipped machine: tokens a second, bottleneck, host memory; and the largest model of these
/// widths that can be trained there at all. Lines of a Markdown table.
std::string machine_table(const ModelSpec& spec, const RunConfig& config, std::size_t data_bytes);

}  // namespace layerstream
