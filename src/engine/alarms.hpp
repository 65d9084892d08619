#pragma once

#include <string>
#include <vector>

#include "backends/measure_rates.hpp"
#include "engine/step_report.hpp"

namespace layerstream {

/// What keeps a step from running as fast as the machine could, each with its cause and what the user can do:
/// a direction of the link below 60% of its measured rate while the compute lane waits for it; the device
/// busy for less than 80% of the step; host memory saturated by the update, or the compute lane waiting for
/// the host's part of it. Empty when all is well. Rates of 0 were not measured, and raise nothing.
std::vector<std::string> alarms_of(const StepReport& report, const MeasuredRates& measured);

}  // namespace layerstream
