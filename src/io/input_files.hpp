#pragma once

#include <cstdint>
#include <filesystem>
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

/// The files that `inputs` (files and directories) stand for: inputs in the order given, each directory
/// walked recursively, its files in the byte order of their paths. Within directories, hidden entries and
/// special files are left out and noted in `report`; symbolic links are followed. Throws ConfigError if there
/// is no input, FileError for a missing path or a file that is reached twice.
std::vector<InputFile> find_input_files(const std::vector<std::string>& inputs, DatasetReport& report);

}  // namespace layerstream::io
