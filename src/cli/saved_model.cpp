#include "cli/saved_model.hpp"

#include "io/byte_tokenizer.hpp"

namespace layerstream::cli {

SavedModel::SavedModel(std::filesystem::path directory)
    : directory_(std::move(directory)),
      is_checkpoint_(std::filesystem::exists(directory_ / "manifest.json")),
      config_(read_hf_config(directory_)),
      spec_(parse_hf_config(config_.text, config_.path)) {}

bool SavedModel::uses_byte_tokenizer() const {
  return !std::filesystem::exists(directory_ / "tokenizer.json") &&
         !std::filesystem::exists(directory_ / "tokenizer.model") &&
         !std::filesystem::exists(directory_ / "vocab.json") &&
         spec_.vocab_size >= io::ByteTokenizer::vocab_size;
}

void SavedModel::load(ParameterStore& store) const {
  if (is_checkpoint_) {
    load_checkpoint(io::CheckpointReader(directory_), store);
  } else {
    load_weights(io::ModelFiles(directory_), store);
  }
}

}  // namespace layerstream::cli
