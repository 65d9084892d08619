#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "core/cgroup.hpp"
#include "tests/support/scratch_directory.hpp"

namespace layerstream::test {

/// A made-up /proc and /sys in a temporary directory, removed with the object.
class FakeSystem {
 public:
  /// `path` such as "/proc/meminfo" or "/sys/fs/cgroup/memory.max".
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = at(path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << '\n';
  }

  std::filesystem::path at(const std::string& path) const { return root().string() + path; }
  SystemRoots roots() const { return {root() / "proc", root() / "sys"}; }

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
  const std::filesystem::path& root() const { return scratch_.path(); }
  ScratchDirectory scratch_;
};

}  // namespace layerstream::test
