#pragma once

#include <memory>
#include <optional>
#include <string>

#include "backends/device.hpp"
#include "backends/memory_backend.hpp"
#include "core/ledger.hpp"
#include "core/run_config.hpp"
#include "engine/buffers.hpp"
#include "model/spec.hpp"

namespace layerstream {

/// What an engine is built for.
enum class EngineMode : std::uint8_t {
  train,     ///< gradients and optimizer state
  generate,  ///< weights and keys and values of all layers
};

/// Sets the placement keys that are not given: what needs little memory of the device, and no rates to be
/// chosen.
RunConfig with_default_placement(RunConfig config, const Device& device);

/// What resident_blocks can be: the blocks before the first frozen one.
std::int64_t most_resident_blocks(const ModelLayout& layout);

/// The size of everything that an engine of this model, run and mode needs. Nothing is allocated.
/// @param config placement keys that are not given are the default ones.
/// Throws ConfigError for combinations that cannot work.
EngineShape make_engine_shape(const ModelSpec& spec, const RunConfig& config, EngineMode mode,
                              const Device& device);

/// The part of an engine's shape that says where things are and in which order a step runs: all that follows
/// from placement keys, and nothing else of the shape does but for chunk_tokens.
/// @param layout the model's, with what is frozen for training. Throws as make_engine_shape does.
ScheduleSettings make_schedule_settings(const ModelLayout& layout, const RunConfig& config, EngineMode mode,
                                        const Device& device);

/// Completes the shape with what the backend's slots need, and counts the engine's bytes by laying its
/// buffers out without memory. The engine allocates exactly this.
Ledger plan_memory(EngineShape& shape, const MemoryBackend& backend, const Device& device);

/// Adds what a training process holds besides the engine: its code, libraries and stacks as they stand
/// now (call it after the kernels' runtime has started), the data, and a buffer for weights in transit.
/// @param engine_bytes of host memory that an engine holds now, in whose place the planned one comes
void add_process_lines(Ledger& ledger, std::size_t data_bytes, std::size_t engine_bytes = 0);

/// A whole training process, before it allocates anything.
struct RunPlan {
  EngineShape shape;
  Ledger ledger;  ///< the engine's lines and the process's
};
/// @param data_bytes what the training data hold. @param engine_bytes as of add_process_lines. Throws
/// ConfigError.
RunPlan plan_run(const ModelSpec& spec, const RunConfig& config, Device& device, std::size_t data_bytes,
                 std::size_t engine_bytes = 0);

/// Host bytes that this process may hold: host_memory_limit, else what it holds already and what the system
/// says is available.
struct HostBudget {
  std::size_t bytes = 0;
  std::string bound_by;  ///< the file or key that says so
};
/// @param node that host memory will be bound to: no more than it has (host_node).
HostBudget host_budget(const RunConfig& config, std::optional<int> node = {});

/// Bytes that are missing of either memory.
struct Shortage {
  std::size_t device = 0, host = 0;
  bool any() const { return device > 0 || host > 0; }
};
/// A device that is simulated takes its memory from the host's.
Shortage shortage(const Ledger& ledger, const HostBudget& host, const Device& device);

/// Refuses a run that cannot fit, before anything is allocated: need and have per component, and keys
/// that lower the need of what is short.
/// Throws ResourceError.
void check_memory(const Ledger& ledger, const HostBudget& host, const Device& device);

}  // namespace layerstream
