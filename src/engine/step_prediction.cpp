#include "engine/step_prediction.hpp"

namespace layerstream {

StepPrediction predict_step(const HardwareProfile& profile, const EngineShape& shape, const ChunkPlan& chunks,
                            const std::vector<BlockCost>& costs) {
  ScheduleSettings settings = shape.schedule;
  settings.pending_update = settings.train && settings.optimizer_update == OptimizerUpdate::deferred;
  StepPrediction prediction;
  prediction.schedule = build_schedule(settings, chunks, costs);
  // How fast a card computes depends on how much it rests, and that on how fast it computes: from a card that
  // never rests, two rounds come within a percent.
  double busy = 1.0;
  for (int round = 0; round < 2; ++round) {
    const OperationCosts model(profile, shape, chunks, busy);
    prediction.run = simulate(prediction.schedule, model.of(prediction.schedule));
    busy = prediction.run.use_of(MachineResource::compute);
    if (profile.device.cool_ratio.value == 1.0) break;
  }
  prediction.report = make_step_report(prediction.schedule, prediction.run.times);
  return prediction;
}

std::vector<BlockCost> planned_block_costs(const EngineShape& shape, const MemoryBackend& backend) {
  Ledger ledger;
  Arena host = Arena::dry(Space::host, ledger);
  const ParameterStore store(shape.layout, host, shape.schedule.train);
  return block_costs(shape, store, backend);
}

ChunkPlan uniform_chunk_plan(std::int64_t rows, std::int64_t row_tokens, std::int64_t chunk_tokens) {
  const auto count = static_cast<std::size_t>(row_tokens);
  const TokenRow row{.input_ids = std::vector<std::int32_t>(count, 0),
                     .targets = std::vector<std::int32_t>(count, 0),
                     .document_starts = {0}};
  const std::vector<TokenRow> all(static_cast<std::size_t>(rows), row);
  return make_chunk_plan(all, chunk_tokens);
}

}  // namespace layerstream
