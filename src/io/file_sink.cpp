#include "io/file_sink.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace layerstream::io {

namespace {
/// At most two windows of a file are dirty in the page cache.
constexpr std::uint64_t window_bytes = std::uint64_t{64} << 20;
}  // namespace

FileSink::FileSink(std::shared_ptr<FileSystem> files, std::filesystem::path path)
    : files_(std::move(files)), path_(std::move(path)) {
  fd_ = files_->open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) throw system_error(path_, "creating the file", errno);
}

FileSink::~FileSink() {
  if (fd_ >= 0) files_->close(fd_);
  if (!finished_) files_->unlink(path_.c_str());
}

void FileSink::reserve(std::uint64_t bytes) {
  if (bytes == 0 || files_->reserve(fd_, static_cast<off_t>(bytes)) == 0) return;
  if (errno == ENOSPC || errno == EDQUOT || errno == EIO || errno == EFBIG) {
    throw system_error(path_, fmt::format("reserving {} bytes", bytes), errno);
  }
}

void FileSink::append(std::string_view text) {
  append(std::as_bytes(std::span(text.data(), text.size())));
}

void FileSink::append(std::span<const std::byte> bytes) {
  LAYERSTREAM_EXPECT(!finished_ && fd_ >= 0, "{} is closed", path_.string());
  while (!bytes.empty()) {
    const std::uint64_t room = window_begin_ + window_bytes - bytes_;
    const std::span<const std::byte> piece = bytes.first(std::min<std::uint64_t>(room, bytes.size()));
    write_all(piece);
    hash_.update(piece);
    bytes = bytes.subspan(piece.size());
    if (bytes_ == window_begin_ + window_bytes) end_window();
  }
}

void FileSink::write_all(std::span<const std::byte> bytes) {
  const std::size_t wanted = bytes.size();
  while (!bytes.empty()) {
    const ssize_t written = files_->write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      throw system_error(
          path_,
          fmt::format("writing {} bytes ({} of them came through, {} bytes of the file so far)", wanted,
                      wanted - bytes.size(), bytes_),
          written < 0 ? errno : ENOSPC);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    bytes_ += static_cast<std::uint64_t>(written);
  }
}

void FileSink::end_window() {
  sync_range(window_begin_, bytes_, SYNC_FILE_RANGE_WRITE);
  if (previous_begin_ < window_begin_) {
    sync_range(previous_begin_, window_begin_,
               SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    ::posix_fadvise(fd_, static_cast<off_t>(previous_begin_),
                    static_cast<off_t>(window_begin_ - previous_begin_), POSIX_FADV_DONTNEED);
  }
  previous_begin_ = std::exchange(window_begin_, bytes_);
}

void FileSink::sync_range(std::uint64_t begin, std::uint64_t end, unsigned flags) {
  if (files_->sync_file_range(fd_, static_cast<off_t>(begin), static_cast<off_t>(end - begin), flags) == 0)
    return;
  // The kernel reports a write-back error once: if it is told here, fsync no longer tells it.
  if (errno == EIO || errno == ENOSPC || errno == EDQUOT) {
    throw system_error(path_, fmt::format("writing back bytes [{}, {})", begin, end), errno);
  }
}

void FileSink::finish() {
  LAYERSTREAM_EXPECT(!finished_ && fd_ >= 0, "{} is closed", path_.string());
  // Not repeated after a failure: the kernel may have dropped the pages that it could not write.
  if (files_->fsync(fd_) != 0) throw system_error(path_, fmt::format("syncing {} bytes", bytes_), errno);
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  if (files_->close(std::exchange(fd_, -1)) != 0) throw system_error(path_, "closing the file", errno);
  finished_ = true;
}

void replace_file(const std::shared_ptr<FileSystem>& files, const std::filesystem::path& path,
                  std::string_view text) {
  std::filesystem::path written = path;
  written += ".tmp";
  FileSink sink(files, written);
  sink.append(text);
  sink.finish();
  rename(*files, written, path);
}

}  // namespace layerstream::io
