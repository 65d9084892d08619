#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream::io {

/// A file of a checkpoint, as its manifest has it.
struct CheckpointFile {
  std::string name;
  std::uint64_t bytes;
  std::string xxh3;  ///< ContentHash::hex() of the content
};

/// manifest.json of a checkpoint directory. It is written last: a directory with a good one is complete.
struct CheckpointManifest {
  static constexpr std::string_view file_name = "manifest.json";
  static constexpr std::int64_t current_version = 1;

  std::int64_t step = 0;
  std::vector<CheckpointFile> files;

  std::uint64_t bytes() const;
  /// JSON with a hash of itself, so that no changed byte goes unnoticed.
  std::string to_json() const;
  /// Throws FileError naming `file`: malformed, changed, of another program, or of a newer version.
  static CheckpointManifest from_json(std::string_view text, const std::filesystem::path& file);
};

}  // namespace layerstream::io
