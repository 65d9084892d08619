#include "backends/topology/host_node.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/cgroup.hpp"
#include "core/error.hpp"

namespace layerstream {
namespace {

[[noreturn]] void refuse(const NumaTopology& topology, int node, std::string_view what) {
  std::string hosts;
  for (const NumaNode& candidate : topology.nodes) {
    if (candidate.is_host()) hosts += fmt::format("{}{}", hosts.empty() ? "" : ", ", candidate.id);
  }
  throw ConfigError(
      fmt::format("numa: {}: {}; this machine has {}; choose one with CPUs and memory ({}), auto, or off",
                  node, what, topology.to_text(), hosts.empty() ? "none is known" : hosts));
}

HostNode given(const NumaTopology& topology, int id) {
  HostNode result{.node = id, .required = true, .reason = "set by numa", .warnings = topology.warnings};
  if (topology.nodes.empty()) {  // the system has the last word when memory is bound
    if (topology.complete) {
      result.warnings.push_back(fmt::format(
          "numa: {}: this system lists no memory nodes (its kernel may be built without NUMA), so that binding "
          "to one may be refused; set numa: auto",
          id));
    }
    return result;
  }
  const NumaNode* const node = topology.find(id);
  if (node == nullptr) refuse(topology, id, "there is no such node");
  if (!topology.complete) return result;
  if (!node->has_cpus()) refuse(topology, id, "that node has no CPUs");
  if (!node->has_memory()) refuse(topology, id, "that node has no memory");
  return result;
}

/// Null if distances are not known.
const NumaNode* nearest_host(const NumaTopology& topology, const NumaNode& from) {
  const NumaNode* nearest = nullptr;
  int least = 0;
  for (const NumaNode& node : topology.nodes) {
    if (!node.is_host()) continue;
    const auto at = from.distance_to.find(node.id);
    if (at == from.distance_to.end()) return nullptr;
    if (nearest == nullptr || at->second < least) {
      nearest = &node;
      least = at->second;
    }
  }
  return nearest;
}

HostNode automatic(const NumaTopology& topology, const DeviceCapabilities& device) {
  HostNode result{.warnings = topology.warnings};
  const auto none = [&](std::string reason) {
    result.reason = std::move(reason);
    return result;
  };
  const auto bind = [&](int node, std::string reason) {
    result.node = node;
    return none(std::move(reason));
  };
  if (!topology.complete) {
    return none(topology.nodes.empty() ? "the machine's memory nodes are not known"
                                       : "not all memory nodes are known");
  }
  if (topology.nodes.empty()) return none("the kernel lists no memory nodes: no choice to make");
  const auto num_hosts = std::ranges::count_if(topology.nodes, &NumaNode::is_host);
  if (num_hosts == 0) return none("no node has both CPUs and memory");
  if (num_hosts == 1) {
    if (topology.num_with_memory() == 1) return none("one node has all the memory: no choice to make");
    const int host = std::ranges::find_if(topology.nodes, &NumaNode::is_host)->id;
    if (device.shares_host_page_tables) return bind(host, "it alone has CPUs; other memory is a device's");
    return none(fmt::format(
        "beside node {} there is memory without CPUs (CXL, HBM), which is not this device's; set numa: {} to keep "
        "to that node's",
        host, host));
  }
  const std::optional<int> link_node = device.link_node();
  if (!link_node) return none("which node the device's link ends at is not known; set numa to choose one");
  const NumaNode* const link = topology.find(*link_node);
  if (link == nullptr) {
    result.warnings.push_back(
        fmt::format("the device's link is said to end at NUMA node {}, which is not online", *link_node));
    return none("the node that the device's link ends at is not online; set numa to choose one");
  }
  if (link->is_host()) return bind(link->id, "the device's link ends at it");
  const NumaNode* const nearest = nearest_host(topology, *link);
  if (nearest == nullptr) {
    return none(
        fmt::format("how far node {}, at which the device's link ends, is from those with CPUs is not "
                    "known; set numa to choose one",
                    link->id));
  }
  return bind(nearest->id, fmt::format("the nearest with CPUs to node {}, at which the device's link ends{}",
                                       link->id, link->has_memory() ? " (the device's own memory)" : ""));
}

}  // namespace

std::string HostNode::to_text() const {
  return node ? fmt::format("NUMA node {} ({})", *node, reason)
              : fmt::format("not bound to a NUMA node ({})", reason);
}

HostNode choose_host_node(const NumaTopology& topology, const std::string& setting,
                          const DeviceCapabilities& device) {
  if (setting == "off") return {.reason = "numa: off"};
  if (setting == "auto") return automatic(topology, device);
  const std::optional<std::int64_t> number = parse_kernel_number(setting);
  if (!number || *number < 0 || *number > (1 << 20)) {
    throw ConfigError(fmt::format("numa: {}: expected auto, off, or a node's number", setting));
  }
  return given(topology, static_cast<int>(*number));
}

}  // namespace layerstream
