#include "core/host_memory.hpp"

#include <fmt/format.h>

#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace layerstream {
namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

/// "Key:   123 kB" lines of meminfo files, also those of a node ("Node 0 Key:   123 kB"), in bytes.
std::optional<std::uint64_t> meminfo_bytes(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t at = line.find(key + ":");
    if (at == std::string::npos || (at != 0 && line[at - 1] != ' ')) continue;
    std::istringstream rest(line.substr(at + key.size() + 1));
    std::uint64_t kib = 0;
    if (rest >> kib) return kib * 1024;
  }
  return std::nullopt;
}

/// "inactive_file 123" lines of memory.stat, in bytes.
std::uint64_t stat_bytes(const fs::path& path, const std::string& wanted) {
  std::ifstream file(path);
  std::string key;
  for (std::uint64_t value = 0; file >> key >> value;) {
    if (key == wanted) return value;
  }
  return 0;
}

std::uint64_t minus(std::uint64_t a, std::uint64_t b) {
  return a > b ? a - b : 0;
}

void bind(HostMemory& memory, std::uint64_t available, const fs::path& file) {
  if (available >= memory.available && !memory.bound_by.empty()) return;
  memory.available = available;
  memory.bound_by = file.string();
}

struct MachineMemory {
  std::optional<std::uint64_t> total, available;
};

/// Bytes that count against a group and would not be given back under pressure.
std::optional<std::uint64_t> group_usage(const CgroupDirectory& group, const fs::path& usage_file) {
  const std::optional<std::string> text = read_kernel_file(usage_file);
  const std::optional<std::int64_t> usage = text ? parse_kernel_number(*text) : std::nullopt;
  if (!usage || *usage < 0) return std::nullopt;
  const std::string cache = group.version == 2 ? "inactive_file" : "total_inactive_file";
  return minus(static_cast<std::uint64_t>(*usage), stat_bytes(group.path / "memory.stat", cache));
}

void bind_by_group(HostMemory& memory, const CgroupDirectory& group, const MachineMemory& machine) {
  const fs::path limit_file = group.path / (group.version == 2 ? "memory.max" : "memory.limit_in_bytes");
  const fs::path usage_file = group.path / (group.version == 2 ? "memory.current" : "memory.usage_in_bytes");
  const std::optional<std::string> text = read_kernel_file(limit_file);
  // The root group of v2, and groups whose parent has not enabled the controller, have no such file.
  std::error_code ignored;
  if (!text && !fs::exists(limit_file, ignored)) return;
  if (text && *text == "max") return;
  const std::optional<std::int64_t> limit = text ? parse_kernel_number(*text) : std::nullopt;
  if (!limit || *limit < 0) {
    memory.warnings.push_back(
        fmt::format("{} says '{}', which is no limit that is understood: it is ignored; set "
                    "host_memory_limit if this process is limited",
                    limit_file.string(), text.value_or("")));
    return;
  }
  // v1 writes "no limit" as the largest page-aligned number.
  if (*limit >= (std::int64_t{1} << 62)) return;
  std::optional<std::uint64_t> usage = group_usage(group, usage_file);
  if (!usage) {
    const bool known = machine.total && machine.available;
    usage = known ? minus(*machine.total, *machine.available) : unlimited;
    memory.warnings.push_back(fmt::format(
        "{} cannot be read: {} is taken as used up {}; set host_memory_limit if that is too little",
        usage_file.string(), limit_file.string(),
        known ? "by all that is in use on this machine" : "altogether"));
  }
  bind(memory, minus(static_cast<std::uint64_t>(*limit), *usage), limit_file);
}

}  // namespace

HostMemory HostMemoryProbe::available() const {
  HostMemory memory;
  const fs::path meminfo = roots_.proc / "meminfo";
  MachineMemory machine{meminfo_bytes(meminfo, "MemTotal"), meminfo_bytes(meminfo, "MemAvailable")};
  if (!machine.available) {
    machine.available = meminfo_bytes(meminfo, "MemFree");
    memory.warnings.push_back(
        machine.available ? fmt::format("{} has no MemAvailable: MemFree is used", meminfo.string())
                          : fmt::format("{} does not say how much memory is available: set host_memory_limit",
                                        meminfo.string()));
  }
  if (machine.available) bind(memory, *machine.available, meminfo);
  for (const CgroupDirectory& group : cgroup_directories(roots_, "memory", memory.warnings)) {
    bind_by_group(memory, group, machine);
  }
  if (memory.bound_by.empty()) memory.bound_by = meminfo.string();
  return memory;
}

HostMemory HostMemoryProbe::available_on_node(int node) const {
  HostMemory memory = available();
  const fs::path meminfo = roots_.sys / fmt::format("devices/system/node/node{}/meminfo", node);
  const std::optional<std::uint64_t> free = meminfo_bytes(meminfo, "MemFree");
  if (!free) {
    memory.warnings.push_back(
        fmt::format("{} cannot be read: the memory of NUMA node {} is unknown", meminfo.string(), node));
    return memory;
  }
  bind(memory, *free + meminfo_bytes(meminfo, "Inactive(file)").value_or(0), meminfo);
  return memory;
}

}  // namespace layerstream
