#include "io/input_files.hpp"

#include <algorithm>
#include <map>

#include "core/error.hpp"

namespace layerstream::io {

namespace fs = std::filesystem;

namespace {

class InputWalk {
 public:
  InputWalk(DatasetReport& report, const std::string& key) : report_(report), key_(key) {}

  void add_input(const std::string& input) {
    const fs::path path(input);
    if (input.empty()) throw ConfigError(key_ + ": an empty path; name a file or a directory");
    if (!fs::exists(fs::symlink_status(path))) {
      throw FileError(fmt::format("{}: '{}' does not exist", key_, input));
    }
    const fs::file_status status = fs::status(path);
    if (fs::is_directory(status)) {
      add_directory(path);
    } else if (fs::is_regular_file(status)) {
      add_file(path, false);
    } else if (!fs::exists(status)) {
      throw FileError(fmt::format("{}: '{}' is a symbolic link to nothing", key_, input));
    } else {
      throw FileError(fmt::format("{}: '{}' is neither a file nor a directory", key_, input));
    }
  }

  std::vector<InputFile> take_files() { return std::move(files_); }

 private:
  void add_directory(const fs::path& directory) {
    const std::size_t first = files_.size();
    walk(directory);
    std::sort(files_.begin() + static_cast<std::ptrdiff_t>(first), files_.end(),
              [](const InputFile& a, const InputFile& b) { return a.path.native() < b.path.native(); });
  }

  void walk(const fs::path& directory) {
    refuse_second_visit(directory);
    std::vector<fs::path> entries;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory))
      entries.push_back(entry.path());
    std::sort(entries.begin(), entries.end(),
              [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
    for (const fs::path& entry : entries) {
      const fs::file_status status = fs::status(entry);
      if (entry.filename().native().front() == '.') {
        report_.hidden.add(entry.string());
      } else if (fs::is_directory(status)) {
        walk(entry);
      } else if (fs::is_regular_file(status)) {
        add_file(entry, true);
      } else if (!fs::exists(status)) {
        throw FileError(fmt::format("'{}' is a symbolic link to nothing; remove it or restore its target",
                                    entry.string()));
      } else {
        report_.special_files.add(entry.string());
      }
    }
  }

  void add_file(const fs::path& path, bool from_directory) {
    refuse_second_visit(path);
    files_.push_back({path, static_cast<std::int64_t>(fs::file_size(path)),
                      path.extension() == ".safetensors", from_directory});
  }

  /// Also what ends a walk through a cycle of symbolic links.
  void refuse_second_visit(const fs::path& path) {
    const auto [earlier, is_new] = visited_.emplace(fs::canonical(path).native(), path);
    if (is_new) return;
    throw FileError(
        fmt::format("{}: '{}' is the same as '{}': its documents would count twice; name it once, or raise "
                    "num_train_epochs to repeat all data",
                    key_, path.string(), earlier->second.string()));
  }

  DatasetReport& report_;
  const std::string& key_;
  std::vector<InputFile> files_;
  std::map<std::string, fs::path> visited_;  // canonical path -> path by which it was reached
};

}  // namespace

std::vector<InputFile> find_input_files(const std::vector<std::string>& inputs, DatasetReport& report,
                                        const std::string& key) {
  if (inputs.empty()) {
    throw ConfigError(key + ": no data; name text files, directories or token shards (.safetensors)");
  }
  InputWalk walk(report, key);
  try {
    for (const std::string& input : inputs) walk.add_input(input);
  } catch (const fs::filesystem_error& error) {
    throw FileError(
        fmt::format("{}: cannot read '{}': {}", key, error.path1().string(), error.code().message()));
  }
  return walk.take_files();
}

}  // namespace layerstream::io
