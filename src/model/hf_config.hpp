#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "model/spec.hpp"

namespace layerstream {

/// Reads Hugging Face's config.json, in the spelling of transformers 4 (`torch_dtype`, `rope_theta`,
/// `rope_scaling`) or 5 (`dtype`, `rope_parameters`). Keys that are absent take the family's class default in
/// transformers; keys that cannot change the function are ignored.
///
/// `where` names the text in messages. Throws FileError, naming key and value, when the JSON is malformed, a
/// size is missing or inconsistent, or the file asks for a function that is not implemented here.
ModelSpec parse_hf_config(const std::string& json_text, const std::string& where);

/// The text of a config.json and the path it came from.
struct HfConfigText {
  std::string path;
  std::string text;
};

/// Reads `directory_or_file` itself, or its config.json when it is a directory. Throws FileError.
HfConfigText read_hf_config(const std::filesystem::path& directory_or_file);

/// read_hf_config, then parse_hf_config.
ModelSpec load_hf_config(const std::filesystem::path& directory_or_file);

/// Tokens after which a text has ended: eos_token_id, one or several, of the directory's
/// generation_config.json or else of its config.json; none if neither names any. Throws FileError.
std::vector<std::int32_t> read_end_tokens(const std::filesystem::path& directory);

/// The config.json of an exported model: `json_text` with every key in its place and the dtype replaced in
/// the spelling that stood there (both, if both did). Where none stood, `dtype` is added to a text with
/// `rope_parameters` and `torch_dtype` to any other. `dtype` is fp32, bf16 or fp16.
/// Throws FileError when the text is not a JSON object.
std::string export_hf_config(const std::string& json_text, DType dtype);

}  // namespace layerstream
