#pragma once

#include <string>
#include <vector>

#include "engine/operation_costs.hpp"
#include "engine/step_report.hpp"

namespace layerstream {

/// A step as it would run on a machine.
struct StepPrediction {
  Schedule schedule;
  SimulatedRun run;
  StepReport report;  ///< of the simulated times, as a run makes it of measured ones

  double tokens_per_second(const ChunkPlan& chunks) const {
    return static_cast<double>(chunks.num_tokens()) / run.seconds;
  }
};

/// A step in the middle of training: the update of the step before waits, and runs in it.
/// @param costs by block, of the shape. Milliseconds for a few thousand operations.
StepPrediction predict_step(const HardwareProfile& profile, const EngineShape& shape, const ChunkPlan& chunks,
                            const std::vector<BlockCost>& costs);

/// Block costs of a shape for which nothing is allocated; plan_memory has completed it.
std::vector<BlockCost> planned_block_costs(const EngineShape& shape, const MemoryBackend& backend);

/// What a step of `rows` rows of `row_tokens` tokens each is cut into; the tokens themselves are of no
/// matter.
ChunkPlan uniform_chunk_plan(std::int64_t rows, std::int64_t row_tokens, std::int64_t chunk_tokens);

}  // namespace layerstream
