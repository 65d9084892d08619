#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"

namespace layerstream::io {

/// A tensor to be written.
struct TensorSpec {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;  ///< outermost first; empty for a scalar
};

/// A tensor of a file: its bytes are [begin, end) of the file's data section.
struct TensorEntry {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin;
  std::uint64_t end;
  std::string file;  ///< path of the file, for messages

  std::uint64_t bytes() const { return end - begin; }
  std::int64_t numel() const { return static_cast<std::int64_t>(bytes() / size_of(dtype)); }
};

/// The JSON part of a safetensors file, after https://github.com/huggingface/safetensors: 8 bytes of
/// little-endian header length, the header, the data section.
struct SafetensorsHeader {
  static constexpr std::uint64_t max_bytes = 100'000'000;  ///< the reference implementation's limit

  std::vector<TensorEntry> entries;  ///< by position in the data section, which they cover without gap
  std::map<std::string, std::string> metadata;
};

/// The format's spelling: "F32", "BF16", "BOOL", ...
std::string_view safetensors_name(DType dtype);

/// `name` between quotes, escaped as in JSON, whatever bytes it holds.
std::string in_quotes(std::string_view name);

/// "[2, 3]".
std::string to_string(std::span<const std::int64_t> shape);

/// Parses and validates a header. `data_bytes` is the length of the data section.
/// Throws FileError naming `file`, the tensor and the fault.
SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                           const std::string& file);

/// Lays out `tensors` in the given order. Throws ContractError for a repeated, empty-handed or reserved
/// name, a bad shape, or a tensor whose begin is no multiple of its element size (readers that map the
/// file would refuse it: see aligned_order).
std::vector<TensorEntry> lay_out_safetensors(const std::vector<TensorSpec>& tensors, const std::string& file);

/// Length and JSON of a header, padded with spaces to a multiple of 8 bytes.
std::string format_safetensors_header(const std::vector<TensorEntry>& entries,
                                      const std::map<std::string, std::string>& metadata);

/// The same tensors, larger elements first and otherwise as given: every begin is then aligned.
std::vector<TensorSpec> aligned_order(std::vector<TensorSpec> tensors);

}  // namespace layerstream::io
