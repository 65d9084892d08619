#include "engine/memory_plan.hpp"

#include <algorithm>

#include "core/host_memory.hpp"
#include "core/process_memory.hpp"
#include "engine/engine.hpp"
#include "engine/model_io.hpp"

namespace layerstream {

EngineShape make_engine_shape(const ModelSpec& spec, const RunConfig& config, EngineMode mode) {
  const bool train = mode == EngineMode::train;
  EngineShape shape;
  shape.spec = spec;
  shape.layout = make_layout(spec);
  shape.compute = config.compute_dtype;
  const std::int64_t rows =
      train ? config.per_device_train_batch_size * config.gradient_accumulation_steps : 1;
  shape.bounds = chunk_bounds(rows, config.cutoff_len, config.chunk_tokens);
  shape.loss_tile_tokens = train ? config.loss_tile_tokens : 1;
  shape.max_positions = config.cutoff_len;
  shape.keeps_key_values = !train;

  ScheduleSettings& schedule = shape.schedule;
  schedule.num_blocks = shape.layout.num_blocks();
  schedule.head_uses_embedding = shape.layout.head_uses_embedding;
  schedule.train = train;
  schedule.logits_only = !train;
  schedule.weight_slots = static_cast<int>(std::min<std::int64_t>(config.weight_slots, schedule.num_blocks));
  if (train) {
    schedule.activation_policy = config.activation_policy;
    schedule.activations_on_host = config.activations_on_host;
    schedule.optimizer_update = config.optimizer_update;
  }
  if (schedule.optimizer_update == OptimizerUpdate::immediate && config.max_grad_norm > 0.0) {
    throw ConfigError(
        "optimizer_update: immediate needs max_grad_norm: 0, since clipping must know all gradients "
        "before any parameter moves");
  }
  return shape;
}

Ledger plan_memory(EngineShape& shape, const MemoryBackend& backend) {
  Ledger ledger;
  Arena host = Arena::dry(Space::host, ledger);
  const ParameterStore store(shape.layout, host, shape.schedule.train);
  shape.slot_bytes = 0;
  for (int block = 0; block < shape.layout.num_blocks(); ++block) {
    shape.slot_bytes =
        std::max(shape.slot_bytes, backend.slot_bytes(store.source(block, shape.low_halves_stream())));
  }
  shape.schedule.fetch_lane = backend.fetch_lane();
  const HostBuffers host_buffers(shape, host);
  Arena device = Arena::dry(Space::device, ledger);
  const DeviceBuffers device_buffers(shape, device);
  return ledger;
}

void add_process_lines(Ledger& ledger, std::size_t data_bytes) {
  ledger.add(Space::host, "training data", data_bytes);
  const std::size_t resident = ProcessMemory::now().resident;
  ledger.add(Space::host, "process (code, libraries, stacks)",
             resident > data_bytes ? resident - data_bytes : 0);
  ledger.add(Space::host, "weights between files and slabs", transit_bytes);
}

RunPlan plan_run(const ModelSpec& spec, const RunConfig& config, Device& device, std::size_t data_bytes) {
  const std::unique_ptr<MemoryBackend> backend = make_backend(config, device);
  RunPlan plan{.shape = make_engine_shape(spec, config, EngineMode::train), .ledger = {}};
  plan.ledger = plan_memory(plan.shape, *backend);
  add_process_lines(plan.ledger, data_bytes);
  return plan;
}

HostBudget host_budget(const RunConfig& config) {
  if (config.host_memory_limit) return {*config.host_memory_limit, "host_memory_limit"};
  const HostMemory memory = HostMemoryProbe().available();
  return {memory.available + ProcessMemory::now().resident, memory.bound_by};
}

void check_memory(const Ledger& ledger, const HostBudget& host, const Device& device) {
  const std::size_t device_need = ledger.total(Space::device);
  const std::size_t host_need = ledger.total(Space::host) + (device.uses_host_memory() ? device_need : 0);
  std::string problems;
  if (device_need > device.memory_limit()) {
    problems +=
        fmt::format("device memory: need {}, have {} ({}; device_memory_limit sets it)\n",
                    format_bytes(device_need), format_bytes(device.memory_limit()), device.description());
  }
  if (host_need > host.bytes) {
    problems += fmt::format("host memory: need {}{}, have {} ({})\n", format_bytes(host_need),
                            device.uses_host_memory() ? " (simulated device included)" : "",
                            format_bytes(host.bytes), host.bound_by);
  }
  if (problems.empty()) return;
  throw ResourceError(fmt::format(
      "{}{}  lower chunk_tokens, cutoff_len, per_device_train_batch_size or weight_slots, choose "
      "activation_policy: input, or raise the limit that binds (device_memory_limit, host_memory_limit)",
      problems, ledger.to_table()));
}

}  // namespace layerstream
