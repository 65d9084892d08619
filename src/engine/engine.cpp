#include "engine/engine.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/coherent/coherent_backend.hpp"
#include "backends/explicit/explicit_backend.hpp"
#include "core/affinity.hpp"

namespace layerstream {
namespace {

std::size_t padded(std::size_t bytes) {
  return std::max(bytes, Arena::alignment);
}

/// A row that continues a sequence of `past` tokens, as a step of one chunk.
ChunkPlan continuation(std::span<const std::int32_t> tokens, std::int64_t past) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  ChunkPlan plan;
  plan.input_ids.assign(tokens.begin(), tokens.end());
  plan.targets.assign(tokens.size(), -100);
  for (std::int64_t i = 0; i < count; ++i) plan.positions.push_back(static_cast<std::int32_t>(past + i));
  plan.chunks.push_back(
      {.first_token = 0,
       .num_tokens = count,
       .group = 0,
       .offset_in_group = past,
       .segments = {{.first_query = 0, .num_queries = count, .first_key = 0, .num_keys = past + count}}});
  plan.groups.push_back({.first_token = 0, .num_tokens = past + count, .first_chunk = 0, .num_chunks = 1});
  plan.max_position = past + count;
  return plan;
}

}  // namespace

namespace {

/// Whether kernels take weights from host memory of a device that knows the host's pages only if they are
/// pinned.
bool reads_unshared_host_memory(const RunConfig& config, const Device& device) {
  return backend_decision(config, device).is_coherent() && !device.uses_host_memory() &&
         !device.capabilities().shares_host_page_tables;
}

/// `progress` for work that has no name for what it does.
std::function<void(std::size_t, std::size_t)> within(std::string_view phase, const EngineProgress& progress) {
  if (!progress) return {};
  return [phase, &progress](std::size_t done, std::size_t total) { progress(phase, done, total); };
}

constexpr std::string_view rehearsal_phase = "rehearsing a step";

/// Tells of a run of operations on the thread of the compute lane, which is the caller's.
class RehearsalProgress final : public ExecutionObserver {
 public:
  explicit RehearsalProgress(const EngineProgress& progress) : progress_(progress) {}
  void begin(const Schedule& schedule) override { total_ = schedule.operations.size(); }
  void before(int index, const Operation& operation) override {
    if (operation.lane != Lane::compute || !progress_) return;
    progress_(rehearsal_phase, static_cast<std::size_t>(index), total_);
  }
  void after(int, const Operation&) override {}

 private:
  const EngineProgress& progress_;
  std::size_t total_ = 0;
};

}  // namespace

BackendDecision backend_decision(const RunConfig& config, const Device& device) {
  return choose_backend(config.backend, config.allow_emulation, device.capabilities());
}

std::unique_ptr<MemoryBackend> make_backend(const RunConfig& config, Device& device) {
  const bool by_kernel = config.promotes_by_kernel.value_or(false);
  switch (backend_decision(config, device).backend) {
    case BackendChoice::explicit_copies:
      if (by_kernel || config.updates_in_place.value_or(false)) {
        throw ConfigError(fmt::format(
            "{}: the explicit backend's kernels do not reach host memory; leave it out, or use backend: "
            "coherent (with allow_emulation: true where the device does not share the host's page tables)",
            by_kernel ? "weight_promotion: kernel" : "device_update: in_place"));
      }
      return std::make_unique<ExplicitBackend>(device.link());
    case BackendChoice::coherent:
      if (config.pin_memory == PinMemory::off && reads_unshared_host_memory(config, device)) {
        throw ConfigError(
            "pin_memory: off: the emulated coherent backend's kernels read host memory, which must be pinned for them; "
            "use auto or required, or backend: explicit");
      }
      return std::make_unique<CoherentBackend>(device.link(),
                                               by_kernel ? device.kernel_link() : device.link());
    case BackendChoice::automatic:
      break;
  }
  throw ContractError("a backend that is not decided");
}

HostNode host_node(const RunConfig& config, const Device& device) {
  return choose_host_node(read_numa_topology(), config.numa, device.capabilities());
}

int optimizer_threads(const RunConfig& config) {
  if (config.optimizer_threads > 0) return static_cast<int>(config.optimizer_threads);
  return std::max(1, probe_cpus().usable());
}

Engine::Engine(const ModelSpec& spec, const RunConfig& config, EngineMode mode, Device& device,
               const EngineDiagnostics& diagnostics, const EngineMemory& memory)
    : device_(device),
      diagnostics_(diagnostics),
      backend_(make_backend(config, device)),
      shape_(make_engine_shape(spec, config, mode, device)),
      pool_(optimizer_threads(config)),
      host_node_(layerstream::host_node(config, device)),
      optimizer_(pool_),
      parameter_groups_(shape_.layout, WeightDecay(shape_.layout, config.weight_decay_rules)),
      executor_(device) {
  const Ledger planned = plan_memory(shape_, *backend_, device);
  const HostBudget budget = host_budget(config, host_node_.node);
  check_memory(planned, budget, device);

  const std::size_t host_bytes = padded(planned.total(Space::host));
  const HostRegionOptions host_options{.component = "model state",
                                       .numa_node = host_node_.node,
                                       .must_bind = host_node_.required,
                                       .pool = &pool_,
                                       .available_bytes = config.host_memory_limit,
                                       .progress = within("allocating host memory", memory.progress),
                                       .progress_interval = std::chrono::milliseconds(250)};
  host_region_ = memory.state ? memory.state : std::make_shared<HostRegion>();
  if (memory.state) {
    const std::size_t state_bytes = ParameterStore::bytes(shape_.layout, shape_.schedule.train);
    LAYERSTREAM_EXPECT(host_region_->bytes() >= state_bytes,
                       "a state of {} B in {} B of memory that are said to hold it", state_bytes,
                       host_region_->bytes());
    // A simulated device takes its memory from what this gives back.
    if (device.uses_host_memory() && host_bytes < host_region_->bytes())
      host_region_->resize(host_bytes, host_options);
  }
  // Device memory first: what is refused costs no minute of touching host memory.
  device_region_ = device.allocate(padded(planned.total(Space::device) - device.overhead_bytes()));
  host_region_->resize(host_bytes, host_options);
  if (host_node_.node) host_residency_ = sample_residency(host_region_->data(), host_region_->bytes());
  // Kernels of an emulated coherent backend read host memory where it lies, which must be mapped for them.
  const bool must_pin =
      config.pin_memory == PinMemory::required || reads_unshared_host_memory(config, device);
  // A device that shares the host's page tables reaches memory as it is, as fast (measured on a GH200 by
  // dnhkng, dnhkng.github.io/posts/gh200-benchmarking: 331-339 GB/s unregistered, 328-334 registered).
  const bool is_reached_anyway = device.capabilities().shares_host_page_tables;
  if (must_pin || (config.pin_memory == PinMemory::automatic && !is_reached_anyway)) {
    host_pin_ = device.pin(host_region_->data(), host_region_->bytes(), must_pin,
                           within("pinning host memory", memory.progress));
  }
  if (device.overhead_bytes() > 0) {
    ledger_.add(Space::device, "context and libraries", device.overhead_bytes());
  }
  Arena host(Space::host, host_region_->data(), host_region_->bytes(), ledger_);
  // First of all, so that the state survives whatever else of this memory is laid out anew.
  store_ = std::make_unique<ParameterStore>(shape_.layout, host, shape_.schedule.train);
  host_buffers_ = std::make_unique<HostBuffers>(shape_, host);
  Arena arena(Space::device, device_region_->data(), device_region_->bytes(), ledger_);
  device_buffers_ = std::make_unique<DeviceBuffers>(shape_, arena);
  backend_->attach_slots(device_buffers_->weight_slots, shape_.slot_bytes);
  costs_ = block_costs(shape_, *store_, *backend_);

  // Frequencies may depend on the length of the row: that of a full row, for all rows of a run.
  const RopeFrequencies frequencies =
      rope_frequencies(spec.rope, spec.head_dim, spec.max_position_embeddings, shape_.max_positions);
  std::vector<float> cos(static_cast<std::size_t>(device_buffers_->rope_cos.numel()));
  std::vector<float> sin(cos.size());
  const Shape table = device_buffers_->rope_cos.shape();
  fill_rope_tables(TensorView(cos.data(), table), TensorView(sin.data(), table), frequencies, config.rope);
  const StreamView stream = device.stream(Lane::compute);
  backend_->copy_to_device(device_buffers_->rope_cos.data(), cos.data(), device_buffers_->rope_cos.bytes(),
                           stream);
  backend_->copy_to_device(device_buffers_->rope_sin.data(), sin.data(), device_buffers_->rope_sin.bytes(),
                           stream);
  // What an earlier use of host memory left in the embedding's gradient is not known to be zero.
  const TensorView& written = device_buffers_->embedding_rows_written;
  const std::vector<std::uint8_t> unknown(written ? written.bytes() : 0, 1);
  if (written) backend_->copy_to_device(written.data(), unknown.data(), unknown.size(), stream);
  device.synchronize();

  libraries_.prepare(stream);
  if (shape_.schedule.emits_embedding_rows()) libraries_.prepare(device.stream(Lane::d2h));
  if (!shape_.schedule.device_update.elements.empty()) libraries_.prepare(device.stream(Lane::update));

  runner_ = std::make_unique<StepRunner>(StepRunner::Parts{.shape = shape_,
                                                           .device_buffers = *device_buffers_,
                                                           .host_buffers = *host_buffers_,
                                                           .store = *store_,
                                                           .backend = *backend_,
                                                           .device = device_,
                                                           .optimizer = optimizer_,
                                                           .parameter_groups = parameter_groups_,
                                                           .libraries = libraries_},
                                         diagnostics.poison);
  if (mode == EngineMode::train && diagnostics.rehearse && !device.uses_host_memory())
    rehearse(memory.progress);
}

Engine::~Engine() = default;

std::vector<std::string> Engine::host_memory_warnings() const {
  std::vector<std::string> warnings = host_node_.warnings;
  if (const std::string& shortfall = host_region_->binding_shortfall(); !shortfall.empty()) {
    warnings.push_back(shortfall);
  } else if (host_node_.node && host_residency_.known()) {
    constexpr double tolerated = 0.01;
    if (host_residency_.share_elsewhere(*host_node_.node) > tolerated) {
      warnings.push_back(fmt::format(
          "host memory was bound to NUMA node {}, but not all of it lies there ({}): copies and the host's "
          "optimizer will be slower; `layerstream doctor` looks for the cause",
          *host_node_.node, host_residency_.to_text()));
    }
  }
  return warnings;
}

std::shared_ptr<HostRegion> Engine::release_state(std::unique_ptr<Engine> engine) {
  engine->expect_intact();
  LAYERSTREAM_EXPECT(!engine->pending_ && !engine->resident_has_moved_,
                     "the state is not all on the host; apply_pending brings it");
  return engine->host_region_;
}

MeasuredRates Engine::measure_rates() {
  constexpr std::size_t link_bytes = std::size_t{64} << 20;
  constexpr std::size_t memory_bytes = std::size_t{1} << 30;  // more than caches hold
  const std::size_t first = device_buffers_->first_volatile_byte;
  MeasuredRates rates =
      measure_link(device_, static_cast<std::byte*>(device_region_->data()) + first, host_region_->data(),
                   std::min({link_bytes, device_region_->bytes() - first, host_region_->bytes()}));
  rates.host_memory =
      measure_host_memory(pool_, host_region_->data(), std::min(memory_bytes, host_region_->bytes()));
  return rates;
}

ScheduleSettings Engine::schedule_settings(bool train) const {
  ScheduleSettings settings = shape_.schedule;
  settings.train = train;
  settings.pending_update = pending_.has_value();
  settings.load_resident = has_resident() && !resident_is_current_;
  return settings;
}

void Engine::rehearse(const EngineProgress& progress) {
  // One full chunk, of rows as long as it takes.
  const std::int64_t row_tokens = std::min(shape_.bounds.row_tokens, shape_.bounds.chunk_tokens);
  const auto count = static_cast<std::size_t>(row_tokens);
  const TokenRow row{.input_ids = std::vector<std::int32_t>(count, 0),
                     .targets = std::vector<std::int32_t>(count, 0),
                     .document_starts = {0}};
  const std::vector<TokenRow> rows(static_cast<std::size_t>(shape_.bounds.chunk_tokens / row_tokens), row);
  const ChunkPlan chunks = make_chunk_plan(rows, shape_.bounds.chunk_tokens);
  ScheduleSettings settings = schedule_settings(true);
  settings.load_resident = false;
  // Immediate updates would move parameters.
  settings.optimizer_update = OptimizerUpdate::deferred;
  const StreamView stream = device_.stream(Lane::compute);
  libraries_.set_rehearsing(stream, true);
  runner_->begin(chunks, 0.0, {});
  RehearsalProgress observer(progress);
  try {
    executor_.run(build_schedule(settings, chunks, costs_), *runner_, &observer);
  } catch (const Error&) {
    // What progress threw has become an error of an operation: thrown again, it is what it was.
    if (progress) progress(rehearsal_phase, 0, 1);
    throw;
  }
  libraries_.set_rehearsing(stream, false);
}

void Engine::run(Schedule schedule) {
  schedule_ = std::move(schedule);
  failed_ = true;
  executor_.run(schedule_, *runner_, diagnostics_.observer);
  failed_ = false;
  resident_is_current_ = true;
}

void Engine::expect_intact() const {
  if (failed_)
    throw Error("the engine failed in the middle of a step before; resume from the newest checkpoint");
}

void Engine::poison_buffers() {
  const std::size_t first = device_buffers_->first_volatile_byte;
  device_.poison(static_cast<std::byte*>(device_region_->data()) + first, device_region_->bytes() - first,
                 device_.stream(Lane::compute));
  const auto poison_host = [](const TensorView& view) {
    if (view) std::memset(view.data(), 0xff, view.bytes());
  };
  for (const TensorView& view : host_buffers_->inputs) poison_host(view);
  for (const DecoderIntermediates& set : host_buffers_->intermediates) {
    for_each_pair(set, set, [&](const TensorView& view, const TensorView&) { poison_host(view); });
  }
  if (!pending_) {
    for (const TensorView& view : host_buffers_->gradients) poison_host(view);
    if (const TensorView& written = device_buffers_->embedding_rows_written) {
      device_.poison(written.data(), written.bytes(), device_.stream(Lane::compute));
    }
    for (const TensorView& view : device_buffers_->block_gradients) {
      if (view) device_.poison(view.data(), view.bytes(), device_.stream(Lane::compute));
    }
  }
  device_.synchronize();  // other lanes begin at once
}

StepResult Engine::train_step(std::span<const TokenRow> rows, const StepSettings& settings) {
  LAYERSTREAM_EXPECT(shape_.schedule.train, "an engine built for generation cannot train");
  expect_intact();
  const ChunkPlan chunks = make_chunk_plan(rows, shape_.bounds.chunk_tokens);
  StepResult result{.loss = std::numeric_limits<double>::quiet_NaN(),
                    .num_tokens = chunks.num_tokens(),
                    .num_targets = chunks.num_targets};
  if (chunks.num_targets == 0) return result;
  if (diagnostics_.poison) poison_buffers();

  const bool immediate = shape_.schedule.optimizer_update == OptimizerUpdate::immediate;
  // Updates in this step's schedule: its own when immediate, the one before's when deferred.
  runner_->begin(chunks, settings.max_grad_norm,
                 immediate ? settings.adamw : pending_.value_or(ops::AdamWSettings{}));
  Schedule schedule = build_schedule(schedule_settings(true), chunks, costs_);
  schedule.step = settings.adamw.step;
  if (pending_) resident_has_moved_ = has_resident();
  pending_.reset();
  run(std::move(schedule));

  const StepVerdict& verdict = runner_->verdict();
  result.loss = verdict.nll_sum / static_cast<double>(chunks.num_targets);
  result.grad_norm = verdict.grad_norm;
  result.clip_scale = verdict.clip_scale;
  result.applied = verdict.finite;
  if (verdict.finite && !immediate) {
    pending_ = settings.adamw;
    pending_->gradient_scale = verdict.clip_scale;
  }
  return result;
}

void Engine::apply_pending() {
  expect_intact();
  if (!pending_ && !resident_has_moved_) return;
  const ChunkPlan nothing;
  const ScheduleSettings settings = schedule_settings(true);
  runner_->begin(nothing, 0.0, pending_.value_or(ops::AdamWSettings{}));
  pending_.reset();
  run(build_update_schedule(settings, costs_));
  resident_has_moved_ = false;
}

double Engine::evaluate(std::span<const TokenRow> rows) {
  apply_pending();
  const ChunkPlan chunks = make_chunk_plan(rows, shape_.bounds.chunk_tokens);
  if (diagnostics_.poison) poison_buffers();
  runner_->begin(chunks, 0.0, {});
  ScheduleSettings settings = schedule_settings(false);
  settings.logits_only = false;
  run(build_schedule(settings, chunks, costs_));
  return runner_->read_nll_sum();
}

std::vector<float> Engine::append(std::span<const std::int32_t> tokens) {
  LAYERSTREAM_EXPECT(shape_.keeps_key_values, "an engine built for training keeps no keys and values");
  LAYERSTREAM_EXPECT(!tokens.empty(), "nothing to append");
  expect_intact();
  const auto capacity = shape_.bounds.group_tokens;
  if (sequence_length_ + static_cast<std::int64_t>(tokens.size()) > capacity) {
    throw ConfigError(fmt::format("the sequence would have {} tokens, room is for {}: raise cutoff_len",
                                  sequence_length_ + static_cast<std::int64_t>(tokens.size()), capacity));
  }
  while (!tokens.empty()) {
    const std::size_t count = std::min(tokens.size(), static_cast<std::size_t>(shape_.bounds.chunk_tokens));
    const ChunkPlan chunks = continuation(tokens.first(count), sequence_length_);
    runner_->begin(chunks, 0.0, {});
    run(build_schedule(schedule_settings(false), chunks, costs_));
    sequence_length_ += static_cast<std::int64_t>(count);
    tokens = tokens.subspan(count);
  }
  return runner_->read_logits();
}

std::vector<float> Engine::gradient(int block, const Parameter& parameter) const {
  LAYERSTREAM_EXPECT(!shape_.layout.is_frozen(block), "block {} is frozen and has no gradient", block);
  std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
  const std::int64_t kept = shape_.schedule.device_update.kept(block);
  const std::int64_t on_device = std::clamp<std::int64_t>(kept - parameter.offset, 0, parameter.numel());
  if (on_device > 0) {
    const float* const home = device_buffers_->block_gradients[static_cast<std::size_t>(block)].as<float>();
    device_.link().copy(values.data(), home + parameter.offset,
                        static_cast<std::size_t>(on_device) * sizeof(float), device_.stream(Lane::d2h));
    device_.synchronize();
  }
  const auto slab = static_cast<std::size_t>(host_gradient_slab(shape_.schedule, block));
  if (on_device == parameter.numel()) return values;
  const float* const home =
      host_buffers_->gradients[slab].as<float>() + (parameter.offset + on_device - kept);
  std::copy(home, home + (parameter.numel() - on_device), values.begin() + on_device);
  return values;
}

}  // namespace layerstream
