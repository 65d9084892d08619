#include "cli/saved_model.hpp"

#include "core/config.hpp"

namespace layerstream::cli {

SavedModel::SavedModel(std::filesystem::path directory)
    : directory_(std::move(directory)),
      is_checkpoint_(std::filesystem::exists(directory_ / "manifest.json")),
      config_(read_hf_config(directory_)),
      spec_(parse_hf_config(config_.text, config_.path)) {}

RunConfig SavedModel::trained_with() const {
  if (!is_checkpoint_) return {};
  return load_config(directory_ / "run.yaml").run;
}

void SavedModel::load(ParameterStore& store) const {
  if (is_checkpoint_) {
    load_checkpoint(io::CheckpointReader(directory_), store);
  } else {
    load_weights(io::ModelFiles(directory_), store);
  }
}

}  // namespace layerstream::cli
