#include "io/append_file.hpp"

#include <fcntl.h>

#include <cerrno>
#include <system_error>

#include "io/file_source.hpp"

namespace layerstream::io {

AppendFile::AppendFile(std::filesystem::path path, std::uint64_t kept, std::shared_ptr<FileSystem> files)
    : files_(std::move(files)), path_(std::move(path)), bytes_(kept) {
  std::error_code absent;
  const std::uintmax_t present = std::filesystem::file_size(path_, absent);
  fd_ = files_->open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) throw system_error(path_, "opening the file", errno);
  if (!absent && bytes_ != present && files_->truncate(fd_, static_cast<off_t>(bytes_)) != 0) {
    const int error_number = errno;
    files_->close(fd_);
    throw system_error(path_, fmt::format("cutting the file to {} bytes", bytes_), error_number);
  }
}

AppendFile::~AppendFile() {
  files_->close(fd_);
}

void AppendFile::append(std::string_view record) {
  std::string_view left = record;
  while (!left.empty()) {
    const ssize_t written = files_->write(fd_, left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error_number = written < 0 ? errno : ENOSPC;
      files_->truncate(fd_, static_cast<off_t>(bytes_));  // no torn record before the next one
      throw system_error(path_, fmt::format("writing {} bytes", record.size()), error_number);
    }
    left.remove_prefix(static_cast<std::size_t>(written));
  }
  bytes_ += record.size();
}

std::string text_if_present(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored) ? read_text(path) : std::string();
}

std::size_t read_appended_lines(
    std::string_view text, const std::filesystem::path& path,
    const std::function<bool(std::string_view line, const std::string& place)>& read) {
  std::size_t begin = 0;
  for (std::int64_t number = 1; begin < text.size(); ++number) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string_view::npos) break;
    try {
      if (!read(text.substr(begin, end - begin), fmt::format("{}:{}", path.string(), number))) break;
    } catch (const FileError&) {
      if (end + 1 == text.size()) break;
      throw;
    }
    begin = end + 1;
  }
  return begin;
}

std::size_t kept_bytes(std::string_view text, std::int64_t resumed_step, const std::filesystem::path& path,
                       const StepOfLine& step_of) {
  try {
    return read_appended_lines(text, path, [&](std::string_view line, const std::string& place) {
      const std::optional<std::int64_t> step = step_of(line, place);
      return !step || *step <= resumed_step;
    });
  } catch (const FileError& error) {
    throw FileError(fmt::format("{}; repair the line, or move the file away", error.what()));
  }
}

}  // namespace layerstream::io
