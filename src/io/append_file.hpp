#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "io/file_system.hpp"

namespace layerstream::io {

/// A file that grows by records, each handed to the kernel when it is written, so that a killed run keeps it.
class AppendFile {
 public:
  /// @param kept bytes of a file that is there already; what follows them is cut off. Throws FileError.
  AppendFile(std::filesystem::path path, std::uint64_t kept, std::shared_ptr<FileSystem> files);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  std::uint64_t bytes() const { return bytes_; }
  /// Throws FileError; the file then ends with the record before.
  void append(std::string_view record);

 private:
  std::shared_ptr<FileSystem> files_;
  std::filesystem::path path_;
  int fd_ = -1;
  std::uint64_t bytes_ = 0;
};

/// The content of `path`; empty if nothing is there. Throws FileError.
std::string text_if_present(const std::filesystem::path& path);

/// Reads a text of lines to which a run appends: the last line is left out if it is torn, which it is without
/// an end, or where it is none by its content and the disk has lost its front.
/// @param read called with each line, and its place in the file; whether to go on behind it. Throws FileError
///   for what is no line.
/// @return bytes of the lines behind which it went on. Throws FileError as `read` does for a line before the
///   last.
std::size_t read_appended_lines(
    std::string_view text, const std::filesystem::path& path,
    const std::function<bool(std::string_view line, const std::string& place)>& read);

/// The step that a line is of; none: a line of no step. Throws FileError naming `place` for a line that is
/// none.
using StepOfLine =
    std::function<std::optional<std::int64_t>(std::string_view line, const std::string& place)>;

/// Length of the part of a text of lines that a run resumed at `resumed_step` keeps: up to the first line of
/// a later step, and up to a last line that an interrupted run has left unfinished. Throws FileError for a
/// line before the last that `step_of` does not accept.
std::size_t kept_bytes(std::string_view text, std::int64_t resumed_step, const std::filesystem::path& path,
                       const StepOfLine& step_of);

}  // namespace layerstream::io
