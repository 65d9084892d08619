#include "backends/topology/numa_topology.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "core/affinity.hpp"
#include "core/ledger.hpp"

namespace layerstream {
namespace fs = std::filesystem;

namespace {

/// CPUs of a node: none for "", nothing if the file is missing or malformed.
std::optional<std::vector<int>> cpus_of(const fs::path& file) {
  const std::optional<std::string> text = read_kernel_file(file);
  if (!text) return std::nullopt;
  if (text->empty()) return std::vector<int>{};
  return parse_cpu_list(*text);
}

/// "Node 0 MemTotal:       16214228 kB", in bytes.
std::optional<std::uint64_t> memory_of(const fs::path& meminfo) {
  std::ifstream file(meminfo);
  for (std::string line; std::getline(file, line);) {
    constexpr std::string_view key = "MemTotal:";
    const std::size_t at = line.find(key);
    if (at == std::string::npos) continue;
    std::istringstream rest(line.substr(at + key.size()));
    std::int64_t kib = -1;
    std::string unit;
    constexpr std::int64_t most = std::int64_t{1} << 44;  // 16 EiB
    if (!(rest >> kib >> unit) || unit != "kB" || kib < 0 || kib > most) return std::nullopt;
    return static_cast<std::uint64_t>(kib) * 1024;
  }
  return std::nullopt;
}

/// One number for each node that is online, in their order.
std::optional<std::map<int, int>> distances_of(const fs::path& path, const std::vector<int>& online) {
  std::ifstream file(path);
  std::map<int, int> distances;
  std::size_t count = 0;
  for (std::string word; file >> word; ++count) {
    const std::optional<std::int64_t> distance = parse_kernel_number(word);
    if (!distance || *distance < 0 || *distance > 255 || count >= online.size()) return std::nullopt;
    distances[online[count]] = static_cast<int>(*distance);
  }
  if (count != online.size()) return std::nullopt;
  return distances;
}

}  // namespace

const NumaNode* NumaTopology::find(int id) const {
  const auto at = std::ranges::find(nodes, id, &NumaNode::id);
  return at == nodes.end() ? nullptr : &*at;
}

int NumaTopology::num_with_memory() const {
  return static_cast<int>(std::ranges::count_if(nodes, &NumaNode::has_memory));
}

std::string NumaTopology::to_text() const {
  std::string text;
  int empty = 0;
  for (const NumaNode& node : nodes) {
    if (!node.has_cpus() && !node.has_memory()) {
      ++empty;
      continue;
    }
    text += fmt::format("{}node {}: {}, {}", text.empty() ? "" : "; ", node.id,
                        node.has_cpus() ? "CPUs " + format_cpu_list(node.cpus) : "no CPUs",
                        node.has_memory() ? format_bytes(node.memory_bytes) : "no memory");
  }
  if (empty > 0) text += fmt::format("{}{} without CPUs or memory", text.empty() ? "" : "; ", empty);
  if (!text.empty()) return text;
  return complete ? "one memory node (the kernel lists none)" : "no memory nodes known";
}

NumaTopology read_numa_topology(const SystemRoots& roots) {
  NumaTopology topology;
  const fs::path folder = roots.sys / "devices/system/node";
  if (std::error_code unreadable; !fs::exists(folder, unreadable) && !unreadable) {
    topology.complete = true;
    return topology;
  }
  const std::optional<std::string> list = read_kernel_file(folder / "online");
  const std::optional<std::vector<int>> online = parse_cpu_list(list.value_or(""));
  if (!online) {
    topology.warnings.push_back(
        fmt::format("{} {}: this machine's memory nodes are unknown, so host memory is not bound to one",
                    (folder / "online").string(),
                    list ? fmt::format("says '{}', which is no list of nodes", *list) : "cannot be read"));
    return topology;
  }
  topology.complete = true;
  for (const int id : *online) {
    const fs::path place = folder / fmt::format("node{}", id);
    NumaNode node{.id = id};
    const auto unknown = [&](const char* file, std::string_view what) {
      topology.complete = false;
      topology.warnings.push_back(fmt::format("{} is missing or malformed: {} of memory node {} unknown",
                                              (place / file).string(), what, id));
    };
    if (auto cpus = cpus_of(place / "cpulist")) {
      node.cpus = std::move(*cpus);
    } else {
      unknown("cpulist", "the CPUs");
    }
    if (const auto bytes = memory_of(place / "meminfo")) {
      node.memory_bytes = *bytes;
    } else {
      unknown("meminfo", "the size");
    }
    if (auto distances = distances_of(place / "distance", *online)) {
      node.distance_to = std::move(*distances);
    } else if (online->size() > 1) {  // only of use where the nearest node is looked for
      topology.warnings.push_back(
          fmt::format("{} is missing or malformed: how far memory node {} is from others is unknown",
                      (place / "distance").string(), id));
    }
    topology.nodes.push_back(std::move(node));
  }
  std::ranges::sort(topology.nodes, {}, &NumaNode::id);
  return topology;
}

}  // namespace layerstream
