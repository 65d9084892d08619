#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/run_config.hpp"
#include "core/worker_pool.hpp"
#include "engine/checkpoint_io.hpp"
#include "model/hf_config.hpp"

namespace layerstream::cli {

/// A checkpoint of ours or a Hugging Face directory, as the source of weights.
class SavedModel {
 public:
  /// Which of the two it is, its contents tell. Throws FileError when it is neither.
  explicit SavedModel(std::filesystem::path directory);

  const std::filesystem::path& directory() const { return directory_; }
  const std::string& config_json() const { return config_.text; }
  const ModelSpec& spec() const { return spec_; }
  /// See read_end_tokens.
  std::vector<std::int32_t> end_tokens() const { return read_end_tokens(directory_); }
  /// How it was trained, where the directory says so; defaults elsewhere.
  RunConfig trained_with() const;
  /// Fills the store, moments left as they are when it has none.
  void load(ParameterStore& store) const;

 private:
  std::filesystem::path directory_;
  bool is_checkpoint_;
  HfConfigText config_;
  ModelSpec spec_;
};

}  // namespace layerstream::cli
