#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream::test {

/// A program for the key `python` that stands in for the one which runs tools/prepare_data: a shell script
/// that notes its arguments and does as told.
class FakePython {
 public:
  /// @param directory exists. @param script what it does, with its arguments in "$@".
  FakePython(std::filesystem::path directory, std::string_view script) : directory_(std::move(directory)) {
    {
      std::ofstream file(directory_ / "python");
      file << "#!/bin/sh\nprintf '%s\\n' \"$@\" >>'" << (directory_ / "arguments").string() << "'\n"
           << script << '\n';
    }
    std::filesystem::permissions(directory_ / "python", std::filesystem::perms::owner_all);
  }

  std::string path() const { return (directory_ / "python").string(); }

  /// Of all its runs so far, one after the other; none if it did not run.
  std::vector<std::string> arguments() const {
    std::ifstream file(directory_ / "arguments");
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }

 private:
  std::filesystem::path directory_;
};

}  // namespace layerstream::test
