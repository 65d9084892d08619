#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "backends/choose_backend.hpp"
#include "backends/device.hpp"
#include "backends/host_region.hpp"
#include "backends/measure_rates.hpp"
#include "backends/memory_backend.hpp"
#include "backends/topology/host_node.hpp"
#include "backends/topology/page_residency.hpp"
#include "core/token_row.hpp"
#include "engine/buffers.hpp"
#include "engine/executor.hpp"
#include "engine/host_optimizer.hpp"
#include "engine/memory_plan.hpp"
#include "engine/parameter_store.hpp"
#include "engine/step_runner.hpp"

namespace layerstream {

/// What one optimizer step did.
struct StepResult {
  double loss = 0.0;  ///< mean over the step's targets; NaN when there was none
  double grad_norm = 0.0;
  double clip_scale = 1.0;
  std::int64_t num_tokens = 0;
  std::int64_t num_targets = 0;
  bool applied = false;  ///< false: no target, or NaN or Inf; nothing has changed
};

/// Hyperparameters of one step; `step` counts applied updates, from 1.
struct StepSettings {
  ops::AdamWSettings adamw;
  double max_grad_norm = 0.0;  ///< 0: no clipping
};

/// Test and diagnosis switches.
struct EngineDiagnostics {
  bool poison = false;   ///< NaN in every buffer that must not be read before it is written
  bool rehearse = true;  ///< on a GPU, before the first step
  ExecutionObserver* observer = nullptr;
};

/// Told while an engine is made, from one thread at a time: "allocating host memory", and how much of it is
/// done, in any unit. May throw.
using EngineProgress = std::function<void(std::string_view phase, std::size_t done, std::size_t total)>;

/// How an engine comes by its memory.
struct EngineMemory {
  EngineProgress progress = {};
  /// What Engine::release_state of an engine of the same model and mode gave: resized and taken over, with
  /// the state that it begins with. Else parameters are zero. If the constructor throws, it still begins with
  /// that state.
  std::shared_ptr<HostRegion> state = {};
};

/// A model in host memory, streaming through a device. One caller at a time. After an exception from a run
/// of operations the state may be half a step further, and every later call throws Error: go on from the
/// newest checkpoint.
class Engine {
 public:
  /// Allocates everything that it will ever use.
  /// @param device outlives the engine.
  /// Throws ConfigError, ResourceError before anything is allocated.
  Engine(const ModelSpec& spec, const RunConfig& config, EngineMode mode, Device& device,
         const EngineDiagnostics& diagnostics = {}, const EngineMemory& memory = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Takes the engine apart. What is returned begins with the state, laid out as ParameterStore does; all
  /// else that the engine held is free. @pre the host has the state, as after apply_pending. Throws
  /// ContractError if it has not.
  static std::shared_ptr<HostRegion> release_state(std::unique_ptr<Engine> engine);

  /// Forward, backward and update over all rows. With deferred updates the parameters move when they are
  /// next needed; `apply_pending` does it at once.
  StepResult train_step(std::span<const TokenRow> rows, const StepSettings& settings);

  /// Applies the update that the last step left waiting, if any. To be called before `parameters` is read.
  void apply_pending();

  /// Forgets the update that the last step left waiting: it will have changed nothing. @pre deferred updates.
  void drop_pending() { pending_.reset(); }

  /// Sum of negative log-likelihoods over the rows' targets; no parameter changes.
  double evaluate(std::span<const TokenRow> rows);

  /// Generation: appends tokens to the sequence so far and returns the logits (V) after the last one.
  std::vector<float> append(std::span<const std::int32_t> tokens);
  /// Generation: the next append starts a new sequence.
  void restart() { sequence_length_ = 0; }
  std::int64_t sequence_length() const { return sequence_length_; }

  /// The state on the host. What is written to it counts from the next call of the engine on. Throws
  /// ContractError while the device has newer state: `apply_pending` brings it.
  ParameterStore& parameters() {
    LAYERSTREAM_EXPECT(!resident_has_moved_, "the device has newer state; apply_pending brings it");
    resident_is_current_ = false;
    return *store_;
  }
  /// To read only. Throws as above.
  const ParameterStore& parameters() const {
    LAYERSTREAM_EXPECT(!resident_has_moved_, "the device has newer state; apply_pending brings it");
    return *store_;
  }
  const EngineShape& shape() const { return shape_; }
  const Ledger& ledger() const { return ledger_; }
  const MemoryBackend& backend() const { return *backend_; }
  /// The node that host memory was to be bound to, and why.
  const HostNode& host_node() const { return host_node_; }
  /// Where host memory lay when it had been made ready.
  const PageResidency& host_residency() const { return host_residency_; }
  /// A sentence for each way in which host memory is not where it was to be.
  std::vector<std::string> host_memory_warnings() const;
  /// What of the host memory copies can use at full speed.
  const HostPin* host_pin() const { return host_pin_.get(); }
  WorkerPool& pool() { return pool_; }
  const ParameterGroups& parameter_groups() const { return parameter_groups_; }
  /// What the link and the host's memory can do, measured on the engine's own memory in some 0.1 s. Host
  /// memory keeps its contents. @pre no call of train_step or evaluate yet.
  MeasuredRates measure_rates();
  /// The schedule that ran last.
  const Schedule& schedule() const { return schedule_; }

  /// A copy of the gradients of the last training step, wherever they wait, fp32, unscaled (deferred updates,
  /// before the next step): of one parameter.
  std::vector<float> gradient(int block, const Parameter& parameter) const;

 private:
  void run(Schedule schedule);
  /// A step that leaves nothing behind, on a device whose kernels gain from being tried out: plans are made,
  /// and matrix products find the fastest algorithm. Touches no host state; resident copies are loaded again
  /// after it.
  void rehearse(const EngineProgress& progress);
  void expect_intact() const;
  void poison_buffers();
  ScheduleSettings schedule_settings(bool train) const;
  bool has_resident() const { return shape_.schedule.device_update.resident_blocks > 0; }

  Device& device_;
  EngineDiagnostics diagnostics_;
  std::unique_ptr<MemoryBackend> backend_;
  EngineShape shape_;
  Ledger ledger_;
  WorkerPool pool_;
  HostNode host_node_;
  std::shared_ptr<HostRegion> host_region_;
  PageResidency host_residency_;
  std::unique_ptr<HostPin> host_pin_;
  std::unique_ptr<DeviceRegion> device_region_;
  std::unique_ptr<ParameterStore> store_;
  std::unique_ptr<HostBuffers> host_buffers_;
  std::unique_ptr<DeviceBuffers> device_buffers_;
  HostOptimizer optimizer_;
  ParameterGroups parameter_groups_;
  ops::Libraries libraries_;
  std::unique_ptr<StepRunner> runner_;
  Executor executor_;
  std::vector<BlockCost> costs_;
  Schedule schedule_;
  std::optional<ops::AdamWSettings> pending_;  ///< gradients wait for this update
  std::int64_t sequence_length_ = 0;
  bool resident_is_current_ = false;  ///< else the host's copy of resident state is newer
  bool resident_has_moved_ = false;   ///< the host's copy is older
  bool failed_ = false;
};

/// The backend that the configuration asks for on this device, which outlives it. Throws ConfigError for one
/// that does not fit the device.
std::unique_ptr<MemoryBackend> make_backend(const RunConfig& config, Device& device);

/// What `backend` comes to on this device, and why. Throws ConfigError for one that does not fit it.
BackendDecision backend_decision(const RunConfig& config, const Device& device);

/// The host node that buffers are bound to (see choose_host_node). Throws ConfigError for one not there.
HostNode host_node(const RunConfig& config, const Device& device);

/// Threads of the host lane's optimizer: optimizer_threads, else the CPUs that this process may use.
int optimizer_threads(const RunConfig& config);

}  // namespace layerstream
