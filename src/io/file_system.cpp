#include "io/file_system.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <system_error>
#include <vector>

namespace layerstream::io {

namespace fs = std::filesystem;

int FileSystem::open(const char* path, int flags, mode_t mode) {
  return ::open(path, flags, mode);
}
ssize_t FileSystem::write(int fd, const void* data, std::size_t bytes) {
  return ::write(fd, data, bytes);
}
int FileSystem::reserve(int fd, off_t bytes) {
  return ::fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, bytes);
}
int FileSystem::sync_file_range(int fd, off_t offset, off_t bytes, unsigned flags) {
  return ::sync_file_range(fd, offset, bytes, flags);
}
int FileSystem::truncate(int fd, off_t bytes) {
  return ::ftruncate(fd, bytes);
}
int FileSystem::fsync(int fd) {
  return ::fsync(fd);
}
int FileSystem::close(int fd) {
  return ::close(fd);
}
int FileSystem::mkdir(const char* path, mode_t mode) {
  return ::mkdir(path, mode);
}
int FileSystem::rename(const char* from, const char* to) {
  return ::rename(from, to);
}
int FileSystem::exchange(const char* a, const char* b) {
  return ::renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE);
}
int FileSystem::symlink(const char* target, const char* path) {
  return ::symlink(target, path);
}

int FileSystem::unlink(const char* path) {
  return ::unlink(path);
}
int FileSystem::rmdir(const char* path) {
  return ::rmdir(path);
}
int FileSystem::statvfs(const char* path, struct ::statvfs* result) {
  return ::statvfs(path, result);
}

namespace {

std::string_view remedy_for(int error_number) {
  switch (error_number) {
    case ENOSPC:
      return " (free space there, or choose another directory or a smaller save_total_limit)";
    case EDQUOT:
      return " (the disk quota is used up: free space, or choose another directory)";
    case EROFS:
    case EACCES:
    case EPERM:
      return " (choose a directory that this user may write)";
    case EMFILE:
      return " (raise the limit of open files: ulimit -n)";
    default:
      return "";
  }
}

}  // namespace

FileError system_error(const fs::path& path, std::string_view what, int error_number) {
  return FileError(fmt::format("{}: {} failed: {}{}", path.string(), what,
                               std::system_category().message(error_number), remedy_for(error_number)));
}

void create_directories(FileSystem& files, const fs::path& path) {
  std::vector<fs::path> missing;
  std::error_code ignored;
  for (fs::path p = fs::absolute(path); !fs::exists(p, ignored); p = p.parent_path()) {
    if (p.has_filename()) missing.push_back(p);
    if (p == p.parent_path()) break;
  }
  for (auto p = missing.rbegin(); p != missing.rend(); ++p) {
    if (files.mkdir(p->c_str(), 0777) != 0 && errno != EEXIST)
      throw system_error(*p, "creating the directory", errno);
    sync_directory(files, p->parent_path());
  }
  if (!fs::is_directory(path, ignored)) {
    throw FileError(fmt::format("{}: exists and is not a directory; choose another name", path.string()));
  }
}

void sync_directory(FileSystem& files, const fs::path& path) {
  const int fd = files.open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) throw system_error(path, "opening the directory", errno);
  const int error_number = files.fsync(fd) == 0 ? 0 : errno;
  files.close(fd);
  // Some network file systems cannot sync a directory; they make renames durable by themselves.
  if (error_number != 0 && error_number != EINVAL)
    throw system_error(path, "syncing the directory", error_number);
}

void rename(FileSystem& files, const fs::path& from, const fs::path& to) {
  if (files.rename(from.c_str(), to.c_str()) != 0) {
    throw system_error(from, fmt::format("renaming to {}", to.string()), errno);
  }
}

void remove_tree(FileSystem& files, const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (status.type() == fs::file_type::not_found) return;
  if (error) throw system_error(path, "looking at it", error.value());
  if (status.type() != fs::file_type::directory) {
    if (files.unlink(path.c_str()) != 0 && errno != ENOENT)
      throw system_error(path, "removing the file", errno);
    return;
  }
  std::vector<fs::path> children;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    children.push_back(it->path());
  }
  if (error) throw system_error(path, "listing the directory", error.value());
  for (const fs::path& child : children) remove_tree(files, child);
  if (files.rmdir(path.c_str()) != 0 && errno != ENOENT)
    throw system_error(path, "removing the directory", errno);
}

void remove_tree_no_throw(FileSystem& files, const fs::path& path) noexcept {
  try {
    remove_tree(files, path);
  } catch (const std::exception&) {
    // The next save or start removes what is left.
  }
}

std::uint64_t free_bytes(FileSystem& files, const fs::path& path) {
  std::error_code ignored;
  fs::path existing = fs::absolute(path);
  while (!fs::exists(existing, ignored) && existing != existing.parent_path())
    existing = existing.parent_path();
  struct ::statvfs status {};
  if (files.statvfs(existing.c_str(), &status) != 0)
    throw system_error(existing, "asking for free space", errno);
  return static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize;
}

}  // namespace layerstream::io
