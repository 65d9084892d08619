#include "core/cgroup.hpp"

#include <fmt/format.h>

#include <charconv>
#include <fstream>
#include <sstream>

namespace layerstream {
namespace fs = std::filesystem;

namespace {

std::vector<std::string> split_at(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool lists(const std::string& comma_separated, std::string_view name) {
  for (const std::string& item : split_at(comma_separated, ',')) {
    if (item == name) return true;
  }
  return false;
}

struct Mount {
  int version;
  std::string root;   // which directory of the hierarchy is mounted
  fs::path location;  // under the injected /sys
};

/// The part of `path` below `prefix`: "" if equal, nothing if it is elsewhere.
std::optional<std::string> below(const std::string& path, const std::string& prefix) {
  if (prefix == "/") return path == "/" ? "" : path;
  if (path == prefix) return "";
  if (path.starts_with(prefix + "/")) return path.substr(prefix.size());
  return std::nullopt;
}

/// mountinfo: "36 35 98:0 /root /mount/point rw,noatime shared:1 - cgroup cgroup rw,memory" (proc(5)).
std::vector<Mount> cgroup_mounts(const SystemRoots& roots, std::string_view controller,
                                 std::vector<std::string>& warnings) {
  std::vector<Mount> mounts;
  std::ifstream file(roots.proc / "self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const std::vector<std::string> before = split_at(line.substr(0, dash), ' ');
    const std::vector<std::string> after = split_at(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.size() < 3) continue;
    const bool v2 = after[0] == "cgroup2";
    if (!v2 && !(after[0] == "cgroup" && lists(after[2], controller))) continue;
    const std::optional<std::string> in_sys = below(before[4], "/sys");
    const fs::path location = in_sys ? fs::path(roots.sys.string() + *in_sys) : fs::path(before[4]);
    mounts.push_back({v2 ? 2 : 1, before[3], location});
  }
  if (!mounts.empty()) return mounts;
  // Without mountinfo: where systemd mounts them.
  const fs::path usual = roots.sys / "fs/cgroup";
  std::error_code ignored;
  if (fs::exists(usual / "cgroup.controllers", ignored)) {
    mounts.push_back({2, "/", usual});
  } else if (fs::exists(usual / controller, ignored)) {
    mounts.push_back({1, "/", usual / controller});
  } else {
    warnings.push_back(fmt::format("no control group hierarchy for '{}' in {} or {}: its limits are unknown",
                                   controller, (roots.proc / "self/mountinfo").string(), usual.string()));
  }
  return mounts;
}

/// /proc/self/cgroup: "0::/path" for v2, "4:memory:/path" for v1 (cgroups(7)).
std::optional<std::string> own_group(const SystemRoots& roots, int version, std::string_view controller) {
  std::ifstream file(roots.proc / "self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool matches =
        version == 2 ? controllers.empty() && line.starts_with("0:") : lists(controllers, controller);
    if (matches) return line.substr(second + 1);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> read_kernel_file(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  while (!line.empty() && (line.back() == ' ' || line.back() == '\r')) line.pop_back();
  return line;
}

std::optional<std::int64_t> parse_kernel_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<CgroupDirectory> cgroup_directories(const SystemRoots& roots, std::string_view controller,
                                                std::vector<std::string>& warnings) {
  std::vector<CgroupDirectory> directories;
  for (const Mount& mount : cgroup_mounts(roots, controller, warnings)) {
    const std::optional<std::string> group = own_group(roots, mount.version, controller);
    if (!group) {
      warnings.push_back(fmt::format("{} has no v{} group for '{}': only {} is looked at",
                                     (roots.proc / "self/cgroup").string(), mount.version, controller,
                                     mount.location.string()));
    }
    // A container without a cgroup namespace of its own mounts its group as the root of what it sees.
    const std::string relative = below(group.value_or("/"), mount.root).value_or("");
    fs::path path = mount.location;
    std::vector<CgroupDirectory> outermost_first{{path, mount.version}};
    for (const std::string& name : split_at(relative, '/')) {
      if (name.empty() || name == ".") continue;
      if (name == "..") break;  // the group is outside of what this namespace sees
      path /= name;
      std::error_code ignored;
      if (!fs::is_directory(path, ignored)) {
        warnings.push_back(fmt::format(
            "control group {} does not exist: the limits of its ancestors are used", path.string()));
        break;
      }
      outermost_first.push_back({path, mount.version});
    }
    directories.insert(directories.end(), outermost_first.rbegin(), outermost_first.rend());
  }
  return directories;
}

}  // namespace layerstream
