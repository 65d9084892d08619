#include "io/file_source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "io/content_hash.hpp"
#include "io/file_system.hpp"

namespace layerstream::io {

FileSource::FileSource(std::filesystem::path path, PageCache cache) : path_(std::move(path)), cache_(cache) {
  // O_NONBLOCK: a named pipe is refused below instead of waited for.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) throw system_error(path_, "opening the file", errno);
  struct ::stat status {};
  const int error_number = ::fstat(fd_, &status) == 0 ? 0 : errno;
  if (error_number != 0 || !S_ISREG(status.st_mode)) {
    ::close(std::exchange(fd_, -1));
    if (error_number != 0) throw system_error(path_, "looking at the file", error_number);
    throw FileError(fmt::format("{}: is not a regular file", path_.string()));
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

FileSource::~FileSource() {
  if (fd_ >= 0) ::close(fd_);
}

FileSource::FileSource(FileSource&& other) noexcept
    : path_(std::move(other.path_)),
      cache_(other.cache_),
      fd_(std::exchange(other.fd_, -1)),
      size_(other.size_) {}

FileSource& FileSource::operator=(FileSource&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(cache_, other.cache_);
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

void FileSource::read(std::uint64_t offset, std::span<std::byte> bytes) const {
  const std::uint64_t begin = offset;
  const std::size_t wanted = bytes.size();
  while (!bytes.empty()) {
    const ssize_t count = ::pread(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      throw system_error(path_, fmt::format("reading {} bytes at byte {}", wanted, begin), errno);
    if (count == 0) {
      throw FileError(
          fmt::format("{}: ends at byte {} while bytes [{}, {}) are read; it had {} bytes when opened",
                      path_.string(), offset, begin, begin + wanted, size_));
    }
    offset += static_cast<std::uint64_t>(count);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  if (cache_ == PageCache::drop && wanted > 0) {
    // The kernel drops whole pages only: starting at the page's begin also takes the page that the
    // read before this one had to leave.
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t first = begin / page * page;
    ::posix_fadvise(fd_, static_cast<off_t>(first), static_cast<off_t>(offset - first), POSIX_FADV_DONTNEED);
  }
}

std::string read_text(const std::filesystem::path& path) {
  const FileSource source(path);
  std::string text(source.size(), '\0');
  source.read(0, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

std::string hash_file(const std::filesystem::path& path) {
  const FileSource source(path, PageCache::drop);
  std::vector<std::byte> buffer(std::min<std::uint64_t>(source.size(), std::uint64_t{4} << 20));
  ContentHash hash;
  for (std::uint64_t offset = 0; offset < source.size();) {
    const auto count = std::min<std::uint64_t>(source.size() - offset, buffer.size());
    const std::span<std::byte> piece = std::span(buffer).first(count);
    source.read(offset, piece);
    hash.update(piece);
    offset += count;
  }
  return hash.hex();
}

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

}  // namespace layerstream::io
