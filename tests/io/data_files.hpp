#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/message_of.hpp"
#include "tests/support/scratch_directory.hpp"

namespace layerstream::io::testing {

/// A directory of its own for each test, removed with it.
class DataDirectory {
 public:
  explicit DataDirectory(const std::filesystem::path& parent = std::filesystem::temp_directory_path())
      : scratch_(parent) {}
  std::string path(const std::string& name) const { return (scratch_.path() / name).string(); }
  std::string root() const { return scratch_.path().string(); }

  /// Creates the file and the directories above it; returns its path.
  std::string write(const std::string& name, std::string_view bytes) const {
    const std::filesystem::path file = scratch_.path() / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream stream(file, std::ios::binary);
    stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!stream.flush()) throw std::runtime_error("cannot write " + file.string());
    return file.string();
  }

 private:
  test::ScratchDirectory scratch_;
};

/// A tensor for a hand-made safetensors file.
struct ShardTensor {
  std::string name;
  std::string dtype;  // as safetensors spells it
  std::string shape;  // JSON
  std::string bytes;
};

/// A rank-1 tensor of the given values, stored as T.
template <class T>
ShardTensor shard_tensor(const std::string& name, const std::string& dtype,
                         const std::vector<std::int64_t>& values) {
  std::string bytes;
  for (const std::int64_t value : values) {
    const T element = static_cast<T>(value);
    bytes.append(reinterpret_cast<const char*>(&element), sizeof(T));
  }
  return {name, dtype, fmt::format("[{}]", values.size()), bytes};
}

inline ShardTensor input_ids(const std::vector<std::int64_t>& values) {
  return shard_tensor<std::int32_t>("input_ids", "I32", values);
}
inline ShardTensor target_mask(const std::vector<std::int64_t>& values) {
  return shard_tensor<std::uint8_t>("target_mask", "U8", values);
}
inline ShardTensor document_offsets(const std::vector<std::int64_t>& values) {
  return shard_tensor<std::int64_t>("document_offsets", "I64", values);
}

/// The bytes of a safetensors file, put together without the code under test.
inline std::string safetensors_bytes(const std::vector<ShardTensor>& tensors) {
  std::string header = "{";
  std::string data;
  for (const ShardTensor& tensor : tensors) {
    if (header.size() > 1) header += ",";
    header += fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", tensor.name,
                          tensor.dtype, tensor.shape, data.size(), data.size() + tensor.bytes.size());
    data += tensor.bytes;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = header.size();
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  return file + header + data;
}

using test::message_of;

}  // namespace layerstream::io::testing
