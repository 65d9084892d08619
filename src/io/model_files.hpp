#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/safetensors.hpp"

namespace layerstream::io {

/// The weights of a Hugging Face model directory: model.safetensors, or the shards that
/// model.safetensors.index.json names. Opening reads headers only. Reads from several threads are fine.
class ModelFiles {
 public:
  /// Throws FileError: no weights there, a malformed index, an absent or malformed shard, a tensor that the
  /// index names and its shard lacks, a tensor in two shards, a shard outside the directory.
  explicit ModelFiles(const std::filesystem::path& directory, PageCache cache = PageCache::drop);

  const std::filesystem::path& directory() const { return directory_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }

  /// Of all tensors, by file and position.
  std::vector<std::string> names() const;
  /// Null if there is none of that name.
  const TensorEntry* find(std::string_view name) const;

  /// As SafetensorsFile::read.
  void read(const TensorEntry& entry, std::uint64_t byte_offset, std::span<std::byte> out) const;

  /// Fills `out` with elements [element_offset, element_offset + out.size()) of a tensor of F32, BF16 or
  /// F16, which convert exactly. Needs no memory beyond `out`. Throws FileError for another dtype.
  void read_as_float(const TensorEntry& entry, std::int64_t element_offset, std::span<float> out) const;

 private:
  struct Location {
    std::size_t file;
    std::size_t entry;
  };
  void open_sharded(const std::filesystem::path& index, PageCache cache);
  void add_file(const std::filesystem::path& path, PageCache cache);

  std::filesystem::path directory_;
  std::vector<SafetensorsFile> files_;
  std::unordered_map<std::string, Location> by_name_;
};

}  // namespace layerstream::io
