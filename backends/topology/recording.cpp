#include "backends/topology/recording.hpp"

#include <fmt/format.h>

#include <fstream>
#include <iterator>

#include "core/affinity.hpp"

namespace layerstream {
namespace fs = std::filesystem;

std::string record_system(const std::string& pci_address, const SystemRoots& roots) {
  std::string text;
  const auto record = [&](const fs::path& root, std::string_view name, const std::string& relative) {
    std::ifstream file(root / relative, std::ios::binary);
    if (!file) return;
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    text += fmt::format("{}==> {}/{} <==\n{}", text.empty() ? "" : "\n", name, relative, content);
    if (!content.ends_with('\n')) text += '\n';
  };
  const auto sys = [&](const std::string& relative) { record(roots.sys, "sys", relative); };
  const auto proc = [&](const std::string& relative) { record(roots.proc, "proc", relative); };
  proc("version");
  proc("driver/nvidia/version");
  proc("sys/kernel/numa_balancing");
  sys("kernel/mm/transparent_hugepage/enabled");
  const std::string nodes = "devices/system/node/";
  for (const char* const list : {"online", "has_cpu", "has_memory"}) sys(nodes + list);
  const auto online = parse_cpu_list(read_kernel_file(roots.sys / nodes / "online").value_or(""));
  if (online) {
    for (const int node : *online) {
      for (const char* const file : {"cpulist", "distance", "meminfo"}) {
        sys(fmt::format("{}node{}/{}", nodes, node, file));
      }
    }
  }
  if (pci_address.empty()) return text;
  for (const char* const file :
       {"numa_node", "current_link_speed", "current_link_width", "max_link_speed", "max_link_width"}) {
    sys(fmt::format("bus/pci/devices/{}/{}", pci_address, file));
  }
  return text;
}

}  // namespace layerstream
