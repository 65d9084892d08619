#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/run_config.hpp"

namespace layerstream::io {

enum class DataRole : std::uint8_t { train, held_out };

/// What `prepared_inputs` calls while it works.
struct PreparationHooks {
  std::function<void(std::string_view line)> say = {};  ///< a line for the log
  std::function<void()> poll = {};  ///< at least five times a second; may throw, which stops the work
};

/// The key that names the data of a role: train_file or dataset, validation_file or eval_dataset; empty if
/// none of the two is given.
std::string_view data_key(const RunConfig& run, DataRole role);

/// The inputs of a role, as DatasetOptions takes them, if nothing has to be tokenized for them: train_file or
/// validation_file, or dataset or eval_dataset if those name token shards. Empty if the role has none of
/// these keys; nullopt if a dataset has to be prepared. Throws ConfigError for token shards among other
/// datasets.
std::optional<std::vector<std::string>> ready_inputs(const RunConfig& run, DataRole role);

/// The inputs of a role. A dataset that is not token shards yet becomes some: tools/prepare_data runs as a
/// child process, which does nothing where the shards of the same content and settings are there already.
/// @param model_config the model's config.json, whose vocabulary the tokens have to fit.
/// Throws ConfigError with what the tool says for a dataset, a tokenizer or a setting that it refuses, and
/// where it cannot be run; Error if it fails in another way; what `hooks` throw.
std::vector<std::string> prepared_inputs(const RunConfig& run, DataRole role,
                                         const std::filesystem::path& model_config,
                                         const PreparationHooks& hooks = {});

}  // namespace layerstream::io
