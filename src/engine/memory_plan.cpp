#include "engine/memory_plan.hpp"

#include <algorithm>
#include <limits>

#include "core/host_memory.hpp"
#include "core/process_memory.hpp"
#include "engine/engine.hpp"
#include "engine/model_io.hpp"
#include "engine/weight_decay.hpp"

namespace layerstream {

namespace {

/// @throws ConfigError for a pattern that would hold in some layers only.
void check_attention_pattern(const ModelSpec& spec) {
  const bool has_windows = spec.sliding_window > 0 && spec.first_window_layer < spec.num_hidden_layers;
  if (spec.attention_pattern.type == AttentionPatternType::full || !has_windows) return;
  throw ConfigError(fmt::format(
      "attention_pattern: the model has a window of its own (sliding_window: {} in its config.json, from layer {} "
      "on), and the two would mix; set attention_pattern: full",
      spec.sliding_window, spec.first_window_layer));
}

/// The device's share of each block, in pieces of about 200 MB of state: large enough for the link's full
/// speed, and a few pieces even of a small share, so that arriving, working and leaving overlap.
DeviceUpdate make_device_update(const ModelLayout& layout, double fraction, bool gradients_on_device,
                                int resident_blocks, bool in_place, int thread_blocks) {
  constexpr std::int64_t unit = 4096, largest_piece = 16 << 20;
  const auto rounded_up = [](std::int64_t elements) { return (elements + unit - 1) / unit * unit; };
  DeviceUpdate update;
  std::int64_t largest_share = 0;
  update.resident_blocks = resident_blocks;
  for (const BlockLayout& block : layout.blocks) {
    if (update.is_resident(static_cast<int>(update.elements.size()))) {
      update.elements.push_back(block.num_elements);
      continue;
    }
    if (layout.is_frozen(static_cast<int>(update.elements.size()))) {
      update.elements.push_back(0);
      continue;
    }
    const auto wanted = static_cast<std::int64_t>(fraction * static_cast<double>(block.num_elements));
    const std::int64_t share = wanted == block.num_elements ? wanted : wanted / unit * unit;
    update.elements.push_back(share);
    largest_share = std::max(largest_share, share);
  }
  if (largest_share == 0 && resident_blocks == 0) return {};
  if (largest_share == 0 || in_place) update.slots = 0;
  update.in_place = in_place;
  update.thread_blocks = in_place ? thread_blocks : 0;
  update.piece_elements = std::clamp(rounded_up(largest_share / 4), unit, largest_piece);
  update.gradients_on_device = gradients_on_device;
  return update;
}

/// Of the host's memory, with that of a simulated device.
std::size_t host_need(const Ledger& ledger, const Device& device) {
  return ledger.total(Space::host) + (device.uses_host_memory() ? ledger.total(Space::device) : 0);
}

}  // namespace

RunConfig with_default_placement(RunConfig config, const Device& device) {
  const auto set_default = [](auto& key, auto value) {
    if (!key) key = value;
  };
  set_default(config.chunk_tokens, default_chunk_tokens);
  set_default(config.weight_slots, 2);
  set_default(config.loop_order, LoopOrder::layer_major);
  set_default(config.activation_policy, ActivationPolicy::input);
  set_default(config.activation_blocks, std::numeric_limits<std::int32_t>::max());
  set_default(config.activation_chunks, std::numeric_limits<std::int32_t>::max());
  set_default(config.device_activation_blocks, 0);
  // A simulated device's optimizer would run on the host's threads as well.
  const bool hosts_alone = config.optimizer_update == OptimizerUpdate::immediate || device.uses_host_memory();
  set_default(config.optimizer_device_share, hosts_alone ? 0.0 : 0.5);
  set_default(config.resident_blocks, 0);
  set_default(config.gradients_on_host, true);
  set_default(config.updates_in_place, false);
  set_default(config.device_update_blocks, 8);  // more take the passes' multiprocessors: see benches/results
  set_default(config.promotes_by_kernel, false);
  return config;
}

std::int64_t most_resident_blocks(const ModelLayout& layout) {
  int first_frozen = 0;
  while (first_frozen < layout.num_blocks() && !layout.is_frozen(first_frozen)) ++first_frozen;
  return first_frozen;
}

EngineShape make_engine_shape(const ModelSpec& spec, const RunConfig& config, EngineMode mode,
                              const Device& device) {
  const bool train = mode == EngineMode::train;
  EngineShape shape;
  shape.spec = spec;
  shape.spec.attention_pattern = config.attention_pattern;
  check_attention_pattern(shape.spec);
  shape.layout = make_layout(spec, train ? config.frozen_parameters : std::vector<std::string>{});
  if (train && !config.weight_decay_rules.empty()) {
    WeightDecay(shape.layout, config.weight_decay_rules);  // what it refuses is refused here
  }
  shape.compute = config.compute_dtype;
  const std::int64_t rows =
      train ? config.per_device_train_batch_size * config.gradient_accumulation_steps : 1;
  shape.bounds = chunk_bounds(rows, config.cutoff_len, config.chunk_tokens.value_or(default_chunk_tokens));
  shape.loss_tile_tokens = train ? config.loss_tile_tokens : 1;
  shape.max_positions = config.cutoff_len;
  shape.keeps_key_values = !train;
  shape.deterministic = config.deterministic;
  shape.on_gpu = !device.uses_host_memory();
  shape.schedule = make_schedule_settings(shape.layout, config, mode, device);
  return shape;
}

ScheduleSettings make_schedule_settings(const ModelLayout& layout, const RunConfig& given, EngineMode mode,
                                        const Device& device) {
  const RunConfig config = with_default_placement(given, device);
  const bool train = mode == EngineMode::train;
  ScheduleSettings schedule;
  schedule.num_blocks = layout.num_blocks();
  schedule.head_uses_embedding = layout.head_uses_embedding;
  schedule.train = train;
  schedule.logits_only = !train;
  if (train && !config.frozen_parameters.empty()) {
    for (int block = 0; block < schedule.num_blocks; ++block) {
      schedule.frozen.push_back(layout.is_frozen(block));
    }
  }
  if (train) {
    const auto at_most_all = [&](std::int64_t blocks) {
      return static_cast<int>(std::min<std::int64_t>(blocks, schedule.num_blocks));
    };
    schedule.loop_order = *config.loop_order;
    schedule.activation_policy = *config.activation_policy;
    schedule.activation_blocks = at_most_all(*config.activation_blocks);
    schedule.activation_chunks = static_cast<int>(*config.activation_chunks);
    schedule.device_activation_blocks = at_most_all(*config.device_activation_blocks);
    schedule.optimizer_update = config.optimizer_update;
    const double share = *config.optimizer_device_share;
    if (config.optimizer_update == OptimizerUpdate::immediate &&
        (share > 0.0 || *config.resident_blocks > 0)) {
      throw ConfigError(
          "optimizer_device_share, resident_blocks: immediate updates are the host's alone, since they may have to stop in the middle; "
          "set both to 0, or optimizer_update: deferred");
    }
    if (const std::int64_t most = most_resident_blocks(layout);
        *config.resident_blocks > most && most < schedule.num_blocks) {
      throw ConfigError(fmt::format(
          "resident_blocks: {} blocks cannot live on the device, since block {} is frozen: only those before the "
          "first frozen one can; lower it to {}, or leave it out",
          *config.resident_blocks, most, most));
    }
    schedule.device_update =
        make_device_update(layout, share, !*config.gradients_on_host, at_most_all(*config.resident_blocks),
                           *config.updates_in_place, static_cast<int>(*config.device_update_blocks));
  }
  schedule.promotes_by_kernel = *config.promotes_by_kernel;
  schedule.weight_slots =
      static_cast<int>(std::min<std::int64_t>(*config.weight_slots, schedule.num_streamed_blocks()));
  int through_ring = 0;  // gradients that leave their buffer
  for (int block = 0; block < schedule.num_blocks; ++block) {
    if (!schedule.has_own_gradient_buffer(block)) ++through_ring;
  }
  schedule.gradient_slots = std::clamp(through_ring, 1, schedule.gradient_slots);
  if (schedule.optimizer_update == OptimizerUpdate::immediate && config.max_grad_norm > 0.0) {
    throw ConfigError(
        "optimizer_update: immediate needs max_grad_norm: 0, since clipping must know all gradients "
        "before any parameter moves");
  }
  return schedule;
}

Ledger plan_memory(EngineShape& shape, const MemoryBackend& backend, const Device& device) {
  Ledger ledger;
  if (device.overhead_bytes() > 0) {
    ledger.add(Space::device, "context and libraries", device.overhead_bytes());
  }
  Arena host = Arena::dry(Space::host, ledger);
  const ParameterStore store(shape.layout, host, shape.schedule.train);
  shape.slot_bytes = 0;
  for (int block = 0; block < shape.layout.num_blocks(); ++block) {
    if (shape.schedule.device_update.is_resident(block)) continue;
    shape.slot_bytes =
        std::max(shape.slot_bytes, backend.slot_bytes(store.source(block, shape.low_halves_stream())));
  }
  shape.schedule.fetch_lane = backend.fetch_lane();
  shape.schedule.kernels_reach_host = backend.kernels_reach_host();
  const HostBuffers host_buffers(shape, host);
  Arena device_arena = Arena::dry(Space::device, ledger);
  const DeviceBuffers device_buffers(shape, device_arena);
  return ledger;
}

void add_process_lines(Ledger& ledger, std::size_t data_bytes, std::size_t engine_bytes) {
  ledger.add(Space::host, "training data", data_bytes);
  const std::size_t resident = ProcessMemory::now().resident;
  const std::size_t counted = data_bytes + engine_bytes;
  ledger.add(Space::host, "process (code, libraries, stacks)", resident > counted ? resident - counted : 0);
  ledger.add(Space::host, "weights between files and slabs", transit_bytes);
}

RunPlan plan_run(const ModelSpec& spec, const RunConfig& config, Device& device, std::size_t data_bytes,
                 std::size_t engine_bytes) {
  const std::unique_ptr<MemoryBackend> backend = make_backend(config, device);
  RunPlan plan{.shape = make_engine_shape(spec, config, EngineMode::train, device), .ledger = {}};
  plan.ledger = plan_memory(plan.shape, *backend, device);
  add_process_lines(plan.ledger, data_bytes, engine_bytes);
  return plan;
}

HostBudget host_budget(const RunConfig& config, std::optional<int> node) {
  if (config.host_memory_limit) return {*config.host_memory_limit, "host_memory_limit"};
  const HostMemoryProbe probe;
  const HostMemory memory = node ? probe.available_on_node(*node) : probe.available();
  return {memory.available + ProcessMemory::now().resident,
          memory.bound_by + (node ? "; numa: off for all nodes' memory" : "")};
}

Shortage shortage(const Ledger& ledger, const HostBudget& host, const Device& device) {
  const auto missing = [](std::size_t need, std::size_t have) { return need > have ? need - have : 0; };
  return {missing(ledger.total(Space::device), device.memory_limit()),
          missing(host_need(ledger, device), host.bytes)};
}

void check_memory(const Ledger& ledger, const HostBudget& host, const Device& device) {
  const Shortage missing = shortage(ledger, host, device);
  if (!missing.any()) return;
  std::string problems;
  if (missing.device > 0) {
    problems += fmt::format("device memory: need {}, have {} ({}; device_memory_limit sets it): {} short\n",
                            format_bytes(ledger.total(Space::device)), format_bytes(device.memory_limit()),
                            device.description(), format_bytes(missing.device));
  }
  if (missing.host > 0) {
    problems += fmt::format("host memory: need {}{}, have {} ({}): {} short\n",
                            format_bytes(host_need(ledger, device)),
                            device.uses_host_memory() ? " (simulated device included)" : "",
                            format_bytes(host.bytes), host.bound_by, format_bytes(missing.host));
  }
  // A simulated device's share of the host's memory is the device's to give back.
  const bool is_simulated = device.uses_host_memory();
  std::string remedies =
      "lower chunk_tokens, cutoff_len or per_device_train_batch_size, choose activation_policy: input";
  if (missing.device > 0 || is_simulated) {
    remedies += ", fewer resident_blocks, weight_slots or device_activation_blocks";
  } else {
    remedies += ", more resident_blocks or device_activation_blocks, gradient_home: device";
  }
  if (missing.host == 0) remedies += ", gradient_home: host";
  if (missing.device > 0) remedies += ", raise device_memory_limit if that binds";
  if (missing.host > 0) {
    remedies += ", raise host_memory_limit if that binds, or take a machine with more host memory";
  }
  throw ResourceError(fmt::format("{}{}  {}", problems, ledger.to_table(), remedies));
}

}  // namespace layerstream
