#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace layerstream {

/// A control group directory of this process and the version of its file names.
struct CgroupDirectory {
  std::filesystem::path path;
  int version;  ///< 1 or 2
};

/// Where the kernel describes itself; a test puts a made-up tree here.
struct SystemRoots {
  std::filesystem::path proc = "/proc";
  std::filesystem::path sys = "/sys";
};

/// The directories that can limit this process's use of `controller` ("memory", "cpu"): its own group
/// and all its ancestors up to the mount point, innermost first, of the v1 hierarchy of that controller
/// and of the v2 hierarchy (cgroups(7)); both in hybrid set-ups. Follows /proc/self/cgroup and
/// /proc/self/mountinfo, so that a container that sees only a part of the hierarchy is understood.
/// What could not be followed is told in `warnings`.
std::vector<CgroupDirectory> cgroup_directories(const SystemRoots& roots, std::string_view controller,
                                                std::vector<std::string>& warnings);

/// First line of a small kernel file; nothing if it cannot be read.
std::optional<std::string> read_kernel_file(const std::filesystem::path& path);

/// A whole decimal number; nothing if the text is anything else.
std::optional<std::int64_t> parse_kernel_number(std::string_view text);

}  // namespace layerstream
