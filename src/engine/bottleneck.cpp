#include "engine/bottleneck.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace layerstream {
namespace {

/// The busiest of what copies and the host's optimizer share.
MachineResource busiest(const SimulatedRun& run) {
  MachineResource most = MachineResource::link_in;
  for (const MachineResource resource :
       {MachineResource::link_out, MachineResource::link_duplex, MachineResource::host_memory}) {
    if (run.use_of(resource) > run.use_of(most)) most = resource;
  }
  return most;
}

std::string_view described(MachineResource resource) {
  switch (resource) {
    case MachineResource::link_in:
      return "the link to the device";
    case MachineResource::link_out:
      return "the link from the device";
    case MachineResource::link_duplex:
      return "the link in both directions";
    default:
      return "the host's memory";
  }
}

std::string_view relief_of(WaitCause cause) {
  switch (cause) {
    case WaitCause::weights:
      return "more tokens a step, or more device memory for resident blocks";
    case WaitCause::optimizer:
      return "more tokens a step, or more device memory for resident blocks";
    case WaitCause::gradients:
      return "more tokens a step, or device memory for gradients";
    case WaitCause::activations:
      return "device memory for activations, or keeping fewer of them";
    case WaitCause::issue:
      return "longer chunks";
  }
  return "";
}

}  // namespace

Bottleneck find_bottleneck(const StepPrediction& prediction) {
  constexpr double hardly_waits = 0.9;
  const StepReport& report = prediction.report;
  const double busy = report.of(Lane::compute).busy / prediction.run.seconds;
  if (busy >= hardly_waits) {
    const double again = 1.0 - report.model_flops / report.device_flops;
    Bottleneck bottleneck{.what = fmt::format("the device computes {:.0f}% of the step", 100.0 * busy),
                          .relief = "only a faster device"};
    if (again > 0.02) {
      bottleneck.what += fmt::format(", {:.0f}% of it again", 100.0 * again);
      bottleneck.relief = "more device memory, to keep activations,";
    }
    return bottleneck;
  }
  const WaitCause cause = *std::ranges::max_element(
      all_wait_causes, {}, [&](WaitCause candidate) { return report.wait(candidate); });
  const MachineResource resource = busiest(prediction.run);
  return {.what = fmt::format("the device waits {:.0f}% of the step for {} ({} is busy {:.0f}% of the step)",
                              100.0 * report.wait(cause) / prediction.run.seconds, name_of(cause),
                              described(resource), 100.0 * prediction.run.use_of(resource)),
          .relief = std::string(relief_of(cause))};
}

}  // namespace layerstream
