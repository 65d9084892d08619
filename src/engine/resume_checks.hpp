#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/run_config.hpp"
#include "engine/trainer_state.hpp"
#include "io/checkpoint.hpp"
#include "model/hf_config.hpp"
#include "model/spec.hpp"

/// Whether a run can go on with a checkpoint, and whether it is then the run that it would have been.
namespace layerstream {

/// The configuration that a checkpoint was written with.
RunConfig settings_of(const io::CheckpointReader& checkpoint);

/// Throws ConfigError naming the keys of config.json that differ if the checkpoint's model computes something
/// else than `spec`, which is `config`'s.
void check_same_model(const io::CheckpointReader& checkpoint, const HfConfigText& config,
                      const ModelSpec& spec);

/// Throws ConfigError naming what of the data and its order is not as it was. @param place of the checkpoint
void check_same_data(const TrainerState& saved, const TrainerState& now, const std::filesystem::path& place);

/// Throws ConfigError if blocks are to be trained whose moments the checkpoint has not got. @param
/// frozen_before, frozen_now as frozen_parameters has them
void check_moments(const std::vector<std::string>& frozen_before, const std::vector<std::string>& frozen_now,
                   const ModelSpec& spec, const std::filesystem::path& place);

/// The keys, "a, b", whose change makes the rest of the run another than the uninterrupted one's; empty if
/// there is none.
std::string changed_settings(const RunConfig& before, const RunConfig& now, const ModelSpec& spec);

}  // namespace layerstream
