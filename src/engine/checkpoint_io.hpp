#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/model_io.hpp"
#include "engine/parameter_store.hpp"
#include "engine/trainer_state.hpp"
#include "io/checkpoint.hpp"

namespace layerstream {

/// What else goes into a checkpoint, so that it can be exported and understood by itself.
struct CheckpointExtras {
  std::string config_json;  ///< the model's
  std::string run_yaml;     ///< the run's configuration
  std::vector<std::filesystem::path> companions;
};

/// Writes `<output_dir>/checkpoint-<global_step>`: per block a safetensors file with each parameter's
/// upper and lower halves and moments, streamed from the slabs. Returns its path. Throws FileError; the
/// newest complete checkpoint stays intact.
std::filesystem::path save_checkpoint(const std::filesystem::path& output_dir, const ParameterStore& store,
                                      const TrainerState& state, const CheckpointExtras& extras,
                                      const std::shared_ptr<io::FileSystem>& files,
                                      const BlockCallback& between_blocks = {});

/// Bytes that such a checkpoint takes.
std::uint64_t checkpoint_bytes(const ModelLayout& layout);

TrainerState read_trainer_state(const io::CheckpointReader& checkpoint);

/// Fills the store with weights, and with moments where the store has them. Throws FileError naming file
/// and tensor for whatever is absent or of another shape or type: state is never guessed.
void load_checkpoint(const io::CheckpointReader& checkpoint, ParameterStore& store,
                     const BlockCallback& between_blocks = {});

/// Where a resume or an export begins: `name` is a checkpoint directory, or "auto" for the newest complete
/// one under `output_dir`; nullopt for "auto" without any.
std::optional<std::filesystem::path> find_resume_point(const std::string& name,
                                                       const std::filesystem::path& output_dir);

}  // namespace layerstream
