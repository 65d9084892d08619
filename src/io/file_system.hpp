#pragma once

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "core/error.hpp"

namespace layerstream::io {

/// The system calls by which this program changes files. Arguments, return values and errno are those of
/// the calls; the error messages are made above this seam. A test derives from it to fail, to cut short,
/// or to be killed at the n-th call. Thread-safe: it has no state.
class FileSystem {
 public:
  FileSystem() = default;
  virtual ~FileSystem() = default;
  FileSystem(const FileSystem&) = delete;
  FileSystem& operator=(const FileSystem&) = delete;

  virtual int open(const char* path, int flags, mode_t mode);
  virtual ssize_t write(int fd, const void* data, std::size_t bytes);
  /// fallocate(2) with FALLOC_FL_KEEP_SIZE: takes the space, leaves the size.
  virtual int reserve(int fd, off_t bytes);
  virtual int sync_file_range(int fd, off_t offset, off_t bytes, unsigned flags);
  virtual int truncate(int fd, off_t bytes);
  virtual int fsync(int fd);
  virtual int close(int fd);
  virtual int mkdir(const char* path, mode_t mode);
  virtual int rename(const char* from, const char* to);
  /// renameat2(2) with RENAME_EXCHANGE: both paths exist before and after.
  virtual int exchange(const char* a, const char* b);
  virtual int symlink(const char* target, const char* path);
  virtual int unlink(const char* path);
  virtual int rmdir(const char* path);
  virtual int statvfs(const char* path, struct ::statvfs* result);
};

/// "<path>: <what> failed: <text of error_number>", with a remedy where one is known (disk full, quota,
/// permission, read-only).
FileError system_error(const std::filesystem::path& path, std::string_view what, int error_number);

/// mkdir -p, each new directory made durable in its parent. Throws FileError.
void create_directories(FileSystem& files, const std::filesystem::path& path);

/// fsync of a directory: makes renames and new names in it durable. Throws FileError.
void sync_directory(FileSystem& files, const std::filesystem::path& path);

/// Throws FileError.
void rename(FileSystem& files, const std::filesystem::path& from, const std::filesystem::path& to);

/// Removes a file or a directory with all it holds; symbolic links are not followed; absent is fine.
/// Throws FileError naming the path that would not go.
void remove_tree(FileSystem& files, const std::filesystem::path& path);

/// remove_tree for destructors: what cannot be removed stays.
void remove_tree_no_throw(FileSystem& files, const std::filesystem::path& path) noexcept;

/// Bytes an unprivileged process can still write under `path`, which need not exist yet: its nearest
/// existing ancestor counts. Throws FileError.
std::uint64_t free_bytes(FileSystem& files, const std::filesystem::path& path);

}  // namespace layerstream::io
