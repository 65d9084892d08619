#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace layerstream::io {

/// What happens to the page cache after a read. `drop` keeps a file of hundreds of GB, read once, from
/// displacing the run's memory; on GH200 file pages may otherwise sit in HBM.
enum class PageCache : bool { keep, drop };

/// A regular file opened for reading by position. Movable; reads from several threads are fine.
class FileSource {
 public:
  /// Throws FileError if it cannot be opened or is no regular file.
  explicit FileSource(std::filesystem::path path, PageCache cache = PageCache::keep);
  ~FileSource();
  FileSource(FileSource&& other) noexcept;
  FileSource& operator=(FileSource&& other) noexcept;

  const std::filesystem::path& path() const { return path_; }
  /// Bytes at the time of opening.
  std::uint64_t size() const { return size_; }

  /// Fills `bytes` from position `offset`. Throws FileError, also when the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> bytes) const;

 private:
  std::filesystem::path path_;
  PageCache cache_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

/// All of a small file. Throws FileError.
std::string read_text(const std::filesystem::path& path);

/// Hash of a file's content as ContentHash::hex(), read in pieces past the page cache. Throws FileError.
std::string hash_file(const std::filesystem::path& path);

/// Whether `name` is the name of a file in a directory, and no path to somewhere else.
bool is_plain_file_name(const std::string& name);

}  // namespace layerstream::io
