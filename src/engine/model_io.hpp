#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "core/dtype.hpp"
#include "engine/parameter_store.hpp"
#include "io/model_files.hpp"
#include "model/spec.hpp"

namespace layerstream {

/// Called between blocks while weights are read or written; may throw to stop.
using BlockCallback = std::function<void(int blocks_done, int num_blocks)>;

/// Fills the store from a Hugging Face directory, exactly, block by block; moments are left as they are.
/// Throws FileError listing every missing, unexpected and mis-shaped tensor before anything is read.
void load_weights(const io::ModelFiles& files, ParameterStore& store, const BlockCallback& between_blocks = {});

struct ExportRequest {
  std::filesystem::path directory;   ///< must not exist, or be empty
  std::string config_json;           ///< the source model's config.json; unknown fields survive
  DType dtype = DType::bf16;         ///< bf16 (rounded to nearest even), fp16 or fp32
  /// Tokenizer and generation files are copied from here; none when empty.
  std::filesystem::path companions_from;
  std::uint64_t max_shard_bytes = std::uint64_t{5} << 30;
};

/// Writes a Hugging Face model directory: config.json, safetensors (sharded when large), companions. It
/// appears complete or not at all. Throws FileError.
void export_model(const ParameterStore& store, const ExportRequest& request);

/// The files beside the weights that belong to a model: tokenizer, chat template, generation settings.
std::vector<std::filesystem::path> companion_files(const std::filesystem::path& directory);

/// The dtype that a config.json names ("bfloat16"), if it is one that can be exported.
std::optional<DType> dtype_from_hf_name(const std::string& name);

}  // namespace layerstream
