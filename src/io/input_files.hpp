#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "io/dataset_report.hpp"

namespace layerstream::io {

struct InputFile {
  std::filesystem::path path;
  std::int64_t bytes;
  bool is_shard;        ///< named *.safetensors
  bool from_directory;  ///< found in a directory, not named by the user
};

/// Called between pieces of reading a file with the bytes of it read so far; may throw to stop.
using PieceCallback = std::function<void(std::int64_t bytes_of_file)>;

/// The files that `inputs` (files and directories) stand for: inputs in the order given, each directory
/// walked recursively, its files in the byte order of their paths. Within directories, hidden entries and
/// special files are left out and noted in `report`; symbolic links are followed. Throws ConfigError if there
/// is no input, FileError for a missing path or a file that is reached twice. @param key of the configuration
/// that names the inputs, for messages.
std::vector<InputFile> find_input_files(const std::vector<std::string>& inputs, DatasetReport& report,
                                        const std::string& key = "train_file");

}  // namespace layerstream::io
