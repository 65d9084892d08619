#pragma once

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "core/cgroup.hpp"

namespace layerstream::test {

/// A made-up /proc and /sys in a temporary directory, removed with the object.
class FakeSystem {
 public:
  FakeSystem() {
    std::string name = (std::filesystem::temp_directory_path() / "layerstream-system-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    root_ = name;
  }
  ~FakeSystem() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  FakeSystem(const FakeSystem&) = delete;
  FakeSystem& operator=(const FakeSystem&) = delete;

  /// `path` such as "/proc/meminfo" or "/sys/fs/cgroup/memory.max".
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = at(path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << '\n';
  }

  std::filesystem::path at(const std::string& path) const { return root_.string() + path; }
  SystemRoots roots() const { return {root_ / "proc", root_ / "sys"}; }

  void has_meminfo(const std::string& total_kib, const std::string& available_kib) const {
    write("/proc/meminfo", "MemTotal:       " + total_kib +
                               " kB\nMemFree:         100 kB\nMemAvailable:   " + available_kib + " kB");
  }

  static constexpr const char* v2_mount =
      "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
  static constexpr const char* v1_memory_mount =
      "35 31 0:32 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory";
  static constexpr const char* v1_cpu_mount =
      "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct";

 private:
  std::filesystem::path root_;
};

}  // namespace layerstream::test
