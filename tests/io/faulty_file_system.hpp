#pragma once

#include <fcntl.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string>
#include <string_view>

#include "io/file_system.hpp"

namespace layerstream::io::testing {

/// The real system calls, counted from 1; at the chosen one something happens.
class FaultyFileSystem : public FileSystem {
 public:
  enum class Fault {
    none,
    error,           ///< this call fails with `error_number`
    kill_before,     ///< SIGKILL before it is made
    kill_within,     ///< SIGKILL, for a write after half of its bytes, otherwise after the call
    disk_full_from,  ///< this and every later call that takes space fails with ENOSPC, a write after half its
                     ///< bytes
  };

  FaultyFileSystem() = default;
  FaultyFileSystem(Fault fault, int at, int error_number = EIO)
      : fault_(fault), at_(at), error_number_(error_number) {}

  int calls() const { return calls_; }
  /// Whether the chosen call was reached.
  bool triggered() const { return triggered_; }
  const std::string& name_of_call() const { return name_; }
  /// renameat2 as on a file system that does not have it.
  void refuse_exchange() { refuse_exchange_ = true; }

  int open(const char* path, int flags, mode_t mode) override {
    return call("open", (flags & O_CREAT) != 0, [&] { return FileSystem::open(path, flags, mode); });
  }
  ssize_t write(int fd, const void* data, std::size_t bytes) override {
    const std::size_t half = bytes / 2;
    if (fault_ == Fault::disk_full_from && calls_ + 1 == at_ && half > 0) {
      ++calls_;
      triggered_ = true;
      return FileSystem::write(fd, data, half);
    }
    if (fault_ == Fault::kill_within && calls_ + 1 == at_) {
      FileSystem::write(fd, data, half);
      ::raise(SIGKILL);
    }
    return call("write", true, [&] { return FileSystem::write(fd, data, bytes); });
  }
  int reserve(int fd, off_t bytes) override {
    return call("reserve", true, [&] { return FileSystem::reserve(fd, bytes); });
  }
  int sync_file_range(int fd, off_t offset, off_t bytes, unsigned flags) override {
    return call("sync_file_range", false,
                [&] { return FileSystem::sync_file_range(fd, offset, bytes, flags); });
  }
  int truncate(int fd, off_t bytes) override {
    return call("truncate", false, [&] { return FileSystem::truncate(fd, bytes); });
  }
  int fsync(int fd) override {
    return call("fsync", false, [&] { return FileSystem::fsync(fd); });
  }
  int close(int fd) override {
    // Linux releases the descriptor even where it reports an error.
    return call(
        "close", false, [&] { return FileSystem::close(fd); }, [&] { FileSystem::close(fd); });
  }
  int mkdir(const char* path, mode_t mode) override {
    return call("mkdir", true, [&] { return FileSystem::mkdir(path, mode); });
  }
  int rename(const char* from, const char* to) override {
    return call("rename", false, [&] { return FileSystem::rename(from, to); });
  }
  int exchange(const char* a, const char* b) override {
    if (refuse_exchange_) {
      errno = EINVAL;
      return -1;
    }
    return call("exchange", false, [&] { return FileSystem::exchange(a, b); });
  }
  int unlink(const char* path) override {
    return call("unlink", false, [&] { return FileSystem::unlink(path); });
  }
  int rmdir(const char* path) override {
    return call("rmdir", false, [&] { return FileSystem::rmdir(path); });
  }

 private:
  template <class Call>
  auto call(
      std::string_view name, bool takes_space, Call&& real, const std::function<void()>& on_error = [] {})
      -> decltype(real()) {
    ++calls_;
    const bool here = calls_ == at_;
    if (here) {
      triggered_ = true;
      name_ = name;
    }
    if (here && fault_ == Fault::kill_before) ::raise(SIGKILL);
    if ((here && fault_ == Fault::error) ||
        (calls_ >= at_ && fault_ == Fault::disk_full_from && takes_space)) {
      on_error();
      errno = fault_ == Fault::disk_full_from ? ENOSPC : error_number_;
      return -1;
    }
    const auto result = real();
    if (here && fault_ == Fault::kill_within) ::raise(SIGKILL);
    return result;
  }

  Fault fault_ = Fault::none;
  int at_ = 0;
  int error_number_ = EIO;
  int calls_ = 0;
  bool triggered_ = false;
  bool refuse_exchange_ = false;
  std::string name_;
};

}  // namespace layerstream::io::testing
