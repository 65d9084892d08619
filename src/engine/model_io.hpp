#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "core/dtype.hpp"
#include "engine/parameter_store.hpp"
#include "io/model_files.hpp"
#include "model/spec.hpp"

namespace layerstream {

/// Host bytes that weights take on their way between files and slabs: a piece in fp32 and, on export, in the
/// file's dtype.
inline constexpr std::size_t transit_bytes = std::size_t{6} << 20;

/// Throws FileError listing every missing, unexpected and mis-shaped tensor.
void check_weights(const io::ModelFiles& files, const ModelLayout& layout);

/// Fills the store from a Hugging Face directory, exactly, block by block; moments are left as they are.
/// Throws as check_weights does, before anything is read.
void load_weights(const io::ModelFiles& files, ParameterStore& store,
                  const BlockCallback& between_blocks = {});

struct ExportRequest {
  std::filesystem::path directory;  ///< must not exist, or be empty
  std::string config_json;          ///< the source model's config.json; unknown fields survive
  DType dtype = DType::bf16;        ///< bf16 (rounded to nearest even), fp16 or fp32
  /// Tokenizer and generation files are copied from here; none when empty.
  std::filesystem::path companions_from = {};
  std::uint64_t max_shard_bytes = std::uint64_t{5} << 30;
};

/// Writes a Hugging Face model directory: config.json, safetensors (sharded when large), companions. It
/// appears complete or not at all. Throws FileError, also for a finite weight that the dtype cannot hold.
void export_model(const ParameterStore& store, const ExportRequest& request);

/// Whether the directory has a tokenizer: then its model knows nothing of byte tokens.
bool has_tokenizer(const std::filesystem::path& directory);

/// The files beside the weights that belong to a model: tokenizer, chat template, generation settings.
std::vector<std::filesystem::path> companion_files(const std::filesystem::path& directory);

/// The dtype that a config.json names ("bfloat16"), if it is one that can be exported.
std::optional<DType> dtype_from_hf_name(const std::string& name);

}  // namespace layerstream
