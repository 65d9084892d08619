#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "core/run_config.hpp"
#include "engine/bottleneck.hpp"
#include "engine/memory_plan.hpp"
#include "engine/step_prediction.hpp"
#include "profiles/hardware/hardware_profile.hpp"

namespace layerstream {

/// A training run with every placement decided, and what a step of it is like.
struct Plan {
  RunConfig config;  ///< all placement keys are given
  RunPlan memory;
  ChunkPlan chunks;  ///< of a step of full rows
  StepPrediction prediction;
  Bottleneck bottleneck;
  int num_candidates = 0;  ///< placements that were simulated

  double tokens_per_second() const { return prediction.tokens_per_second(chunks); }
  /// The placement keys as YAML, a line each.
  std::string placement_yaml() const;
  /// Predicted step time, throughput, use of the machine, bottleneck: lines for the log.
  std::string summary() const;
};

/// A machine to plan for.
struct Machine {
  const HardwareProfile& profile;
  Device& device;  ///< its limit is what may be used
  HostBudget host;
  std::size_t engine_bytes = 0;  ///< as of add_process_lines
};

/// Decides what the configuration leaves open: where states, gradients and kept activations live, what is
/// kept and what recomputed, the order of loops, slots and the split of the optimizer. Whatever it decides,
/// the numbers of the run are the same. Candidates are simulated with the profile's rates; a search from
/// several starts changes one decision at a time for the better. Deterministic. Takes a tenth of a second for
/// some hundred operations a step, seconds for a hundred thousand.
///
/// Keys that are given are obeyed. Throws ConfigError where they contradict each other, ResourceError where
/// nothing fits: with the ledger of the placement that misses least, of those that need the least of the
/// device or of the host.
Plan plan_placement(const ModelSpec& spec, const RunConfig& config, const Machine& machine,
                    std::size_t data_bytes);

/// Whether there is a placement of the run that fits. Much faster than a plan; throws as it does but for
/// memory.
bool can_be_placed(const ModelSpec& spec, const RunConfig& config, const Machine& machine,
                   std::size_t data_bytes);

/// The profile to plan with: the one that hardware_profile names, else the shipped one of this device; none
/// for a simulated device or one that no profile is of.
std::optional<HardwareProfile> profile_of_run(const RunConfig& config, const Device& device);

}  // namespace layerstream
