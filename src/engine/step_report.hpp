#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/lane.hpp"
#include "engine/operation_times.hpp"
#include "engine/schedule.hpp"

namespace layerstream {

/// What the compute lane waited for.
enum class WaitCause : std::uint8_t {
  weights,      ///< on their way to the device
  optimizer,    ///< an update, on the host or the device, whose weights come next
  gradients,    ///< their way to the host, or back
  activations,  ///< their way to the host, or back
  issue,        ///< nothing in the schedule: the host did not issue, or wake up, in time
};
inline constexpr std::array all_wait_causes{WaitCause::weights, WaitCause::optimizer, WaitCause::gradients,
                                            WaitCause::activations, WaitCause::issue};
std::string_view name_of(WaitCause cause);

/// How much something was used.
struct Use {
  double busy = 0.0;  ///< seconds
  double bytes = 0.0;

  /// Bytes a second while busy; 0 if never.
  double rate() const { return busy > 0.0 ? bytes / busy : 0.0; }
};

/// Where the time of a run of operations went.
struct StepReport {
  double seconds = 0.0;                       ///< to the end of the last operation
  std::array<Use, all_lanes.size()> lanes{};  ///< by lane
  Use to_device, to_host;                     ///< each direction of the link, whichever lanes used it
  /// The compute lane's time outside its operations, by cause. With its busy time this makes `seconds`.
  std::array<double, all_wait_causes.size()> waits{};
  /// The same, by the lane of the operation that was waited for; without `issue`.
  std::array<double, all_lanes.size()> waits_for{};
  /// What the model needs: three times the forward pass of every GEMM (6 FLOPs per weight and token, but for
  /// the embedding's lookup) and of attention over visible pairs.
  double model_flops = 0.0;
  double device_flops = 0.0;  ///< what was done: with recomputation

  const Use& of(Lane lane) const { return lanes[static_cast<std::size_t>(lane)]; }
  double wait(WaitCause cause) const { return waits[static_cast<std::size_t>(cause)]; }
  double wait_for(Lane lane) const { return waits_for[static_cast<std::size_t>(lane)]; }
  double busy_fraction() const { return seconds > 0.0 ? of(Lane::compute).busy / seconds : 0.0; }

  /// Lanes with busy share, GB and GB/s, and the compute lane's waits: a few lines.
  std::string to_table() const;
};

/// FLOPs that the model needs for the schedule's tokens; see StepReport::model_flops.
double model_flops(const Schedule& schedule);

/// @param times by operation.
///
/// A gap of the compute lane is explained from its end backwards: by the run of the operation that finished
/// last of those that the next one waits for, then by what that one in turn waited for (its dependencies and
/// its lane's operation before it), until the gap's beginning is reached. What no run covers is `issue`.
StepReport make_step_report(const Schedule& schedule, std::span<const OperationTime> times);

/// Of several runs. @pre at least one.
StepReport mean_of(std::span<const StepReport> reports);

}  // namespace layerstream
