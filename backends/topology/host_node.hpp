#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backends/topology/numa_topology.hpp"

namespace layerstream {

/// The memory node that host buffers are bound to, and why.
struct HostNode {
  std::optional<int> node = {};  ///< none: the system's policy
  /// The user named the node: a run that cannot have it is refused. Else it goes on without.
  bool required = false;
  std::string reason = {};                 ///< "the device's link ends at it"
  std::vector<std::string> warnings = {};  ///< the topology's as well

  /// "NUMA node 1 (the device's link ends at it)", "not bound to a NUMA node (one node: no choice to make)".
  std::string to_text() const;
};

/// The node for the setting `numa`:
///   "off"   none.
///   "auto"  the node at which the device's link ends, if host memory can lie there; else the nearest one
///           with CPUs and memory. Where one node alone has CPUs it is taken if others have memory: on a
///           coherent GPU pages would otherwise move into the device's own (its first touch, migration).
///           None where one node has all the memory, and where the machine is not understood.
///   a number: that node.
/// @param link_node where the device's link ends, as the system or the driver says; it may be a GPU's own
/// node. Throws ConfigError, naming the key numa and the nodes, for a number that is no node with CPUs and
/// memory.
HostNode choose_host_node(const NumaTopology& topology, const std::string& setting,
                          std::optional<int> link_node);

}  // namespace layerstream
