#pragma once

#include <string>

#include "engine/step_prediction.hpp"

namespace layerstream {

/// What a step spends its time on, and what would make it shorter.
struct Bottleneck {
  std::string what;    ///< "the device computes 97% of the step, a quarter of it again"
  std::string relief;  ///< "more device memory, to keep activations"
};

/// Of a simulated step: the device's processors where they hardly wait; else the cause of most of their waits
/// and the busiest of what it goes through.
Bottleneck find_bottleneck(const StepPrediction& prediction);

}  // namespace layerstream
