#include "engine/schedule.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/step_builder.hpp"

namespace layerstream {

std::string_view name_of(OperationKind kind) {
  switch (kind) {
    case OperationKind::update:
      return "update";
    case OperationKind::load_state:
      return "load_state";
    case OperationKind::update_on_device:
      return "update_on_device";
    case OperationKind::store_state:
      return "store_state";
    case OperationKind::fetch_weights:
      return "fetch_weights";
    case OperationKind::release_weights:
      return "release_weights";
    case OperationKind::forward:
      return "forward";
    case OperationKind::save_input:
      return "save_input";
    case OperationKind::save_intermediates:
      return "save_intermediates";
    case OperationKind::loss:
      return "loss";
    case OperationKind::loss_and_gradient:
      return "loss_and_gradient";
    case OperationKind::logits:
      return "logits";
    case OperationKind::load_input:
      return "load_input";
    case OperationKind::load_intermediates:
      return "load_intermediates";
    case OperationKind::clear_gradient:
      return "clear_gradient";
    case OperationKind::load_gradient:
      return "load_gradient";
    case OperationKind::rebuild_key_value:
      return "rebuild_key_value";
    case OperationKind::backward:
      return "backward";
    case OperationKind::gradient_norm:
      return "gradient_norm";
    case OperationKind::emit_gradient:
      return "emit_gradient";
    case OperationKind::keep_gradient:
      return "keep_gradient";
    case OperationKind::verdict:
      return "verdict";
  }
  return "?";
}

std::string Schedule::to_text() const {
  std::string text;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const Operation& operation = operations[i];
    text += fmt::format("{:>5} {:<10} {:<20}", i, name_of(operation.lane), name_of(operation.kind));
    if (operation.block >= 0) text += fmt::format(" block {}", operation.block);
    if (operation.chunk >= 0) text += fmt::format(" chunk {}", operation.chunk);
    if (operation.piece >= 0)
      text += fmt::format(" piece {} state@{}", operation.piece, operation.update_slot);
    if (operation.weight_slot >= 0) text += fmt::format(" weights@{}", operation.weight_slot);
    if (operation.gradient_slot >= 0) text += fmt::format(" gradient@{}", operation.gradient_slot);
    if (operation.intermediate_slot >= 0)
      text += fmt::format(" intermediates@{}", operation.intermediate_slot);
    if (!operation.dependencies.empty())
      text += fmt::format(" after {}", fmt::join(operation.dependencies, ", "));
    text += '\n';
  }
  return text;
}

int host_gradient_slab(const ScheduleSettings& settings, int block) {
  if (settings.optimizer_update == OptimizerUpdate::deferred) return block;
  if (block == 0 && settings.head_uses_embedding) return settings.host_gradient_ring;
  return (settings.num_blocks - 1 - block) % settings.host_gradient_ring;
}

int num_host_gradient_slabs(const ScheduleSettings& settings) {
  if (settings.optimizer_update == OptimizerUpdate::deferred) return settings.num_blocks;
  return settings.host_gradient_ring + (settings.head_uses_embedding ? 1 : 0);
}

std::vector<std::int64_t> intermediate_rows(const ScheduleSettings& settings, const ChunkPlan& chunks) {
  std::vector<std::int64_t> rows(chunks.chunks.size(), -1);
  std::int64_t next = 0;
  for (const ChunkGroup& group : chunks.groups) {
    if (settings.loop_order == LoopOrder::micro_batch_major) next = 0;
    for (int index = settings.first_keeping(group); index < group.num_chunks; ++index) {
      const auto chunk = static_cast<std::size_t>(group.first_chunk + index);
      rows[chunk] = next;
      next += chunks.chunks[chunk].num_tokens;
    }
  }
  return rows;
}

Schedule build_schedule(const ScheduleSettings& settings, const ChunkPlan& chunks,
                        const std::vector<BlockCost>& costs) {
  return StepBuilder(settings, chunks, costs).build();
}

Schedule build_update_schedule(const ScheduleSettings& settings, const std::vector<BlockCost>& costs) {
  const ChunkPlan nothing;
  return StepBuilder(settings, nothing, costs).build_updates();
}

}  // namespace layerstream
