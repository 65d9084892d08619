#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include "io/content_hash.hpp"
#include "io/file_system.hpp"

namespace layerstream::io {

/// A new file, written from front to back. Content is hashed on its way, and leaves the page cache window
/// by window, so that a save of hundreds of GB neither piles up dirty pages nor evicts (on GH200: sits
/// in HBM beside) what the run needs. A sink that is destroyed before finish() removes its file.
class FileSink {
 public:
  /// Creates `path`, or empties it. Throws FileError.
  FileSink(std::shared_ptr<FileSystem> files, std::filesystem::path path);
  ~FileSink();
  FileSink(const FileSink&) = delete;
  FileSink& operator=(const FileSink&) = delete;

  /// Takes disk space for a file of `bytes` at once, so that a full disk shows before the first byte;
  /// does nothing where the file system cannot. Throws FileError.
  void reserve(std::uint64_t bytes);

  /// Writes all of `bytes`, whatever the kernel takes at a time. Throws FileError naming the file, the
  /// bytes wanted, and the cause.
  void append(std::span<const std::byte> bytes);
  void append(std::string_view text);

  /// Makes the content durable and closes the file. Throws FileError. Once only.
  void finish();

  bool finished() const { return finished_; }
  const std::filesystem::path& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }
  /// Hash of what was appended so far.
  const ContentHash& hash() const { return hash_; }

 private:
  void write_all(std::span<const std::byte> bytes);
  void end_window();
  void sync_range(std::uint64_t begin, std::uint64_t end, unsigned flags);

  std::shared_ptr<FileSystem> files_;
  std::filesystem::path path_;
  ContentHash hash_;
  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  std::uint64_t window_begin_ = 0;    ///< being filled
  std::uint64_t previous_begin_ = 0;  ///< [previous_begin_, window_begin_) is on its way to the disk
  bool finished_ = false;
};

/// `text` as the whole content of `path`, which whoever reads it finds as it was before or as it is then.
/// Throws FileError.
void replace_file(const std::shared_ptr<FileSystem>& files, const std::filesystem::path& path,
                  std::string_view text);

}  // namespace layerstream::io
