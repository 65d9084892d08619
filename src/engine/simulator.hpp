#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "engine/operation_times.hpp"
#include "engine/schedule.hpp"

namespace layerstream {

/// What operations of different lanes compete for.
enum class MachineResource : std::uint8_t {
  compute,        ///< the device's processors: kernels of two streams take turns
  device_memory,  ///< its bytes a second
  link_in,        ///< host → device
  link_out,       ///< device → host
  link_duplex,    ///< both directions together
  host_memory,    ///< bytes a second of copies, the optimizer and kernels that read host memory
  host_cores,
};
inline constexpr std::array all_machine_resources{
    MachineResource::compute,    MachineResource::device_memory, MachineResource::link_in,
    MachineResource::link_out,   MachineResource::link_duplex,   MachineResource::host_memory,
    MachineResource::host_cores,
};
std::string_view name_of(MachineResource resource);

/// What an operation takes of a machine.
struct OperationCost {
  double seconds = 0.0;  ///< alone on the machine
  /// Of each resource the fraction that it takes while it runs alone, on average; at most 1.
  std::array<double, all_machine_resources.size()> use{};
  /// How much of a contended resource it gets beside others, relative to theirs; positive.
  double weight = 1.0;
  /// From the end of the last operation that it depends on until it can begin: the waiting thread wakes up.
  double wake_seconds = 0.0;

  double& of(MachineResource resource) { return use[static_cast<std::size_t>(resource)]; }
  double of(MachineResource resource) const { return use[static_cast<std::size_t>(resource)]; }
};

/// A schedule on a machine's rates.
struct SimulatedRun {
  std::vector<OperationTime> times;  ///< by operation, for make_step_report and write_trace
  double seconds = 0.0;              ///< to the end of the last operation
  /// Mean fraction of each resource over the run.
  std::array<double, all_machine_resources.size()> use{};

  double use_of(MachineResource resource) const { return use[static_cast<std::size_t>(resource)]; }
};

/// Runs the operations as the executor would: those of one lane one after another in the order of the
/// schedule, each when its lane is free and its dependencies have ended. Operations that run at the same time
/// share the machine as a fluid: each proceeds at its own full speed or, where a resource has not enough
/// for all, at rates in proportion to their weights (weighted max-min fairness: Bertsekas and Gallager, "Data
/// Networks", 1992, 6.5.2). Rates change only when an operation begins or ends, so the cost is that of as
/// many steps as there are operations: a fraction of a microsecond each.
/// @param costs by operation. Throws ContractError for costs that are negative, not finite, or use more than
/// there is, and for dependencies that can never be met.
SimulatedRun simulate(const Schedule& schedule, std::span<const OperationCost> costs);

}  // namespace layerstream
