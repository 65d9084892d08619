#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backends/device.hpp"
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
///           with CPUs and memory. Where one node alone has CPUs and others have memory, it is taken if the
///           device shares the host's page tables: pages would otherwise move into the device's own memory
///           (its first touch, migration). Beside other devices such nodes are the host's (CXL, a
///           processor's HBM), and the choice is the user's.
///           None where one node has all the memory, and where the machine is not understood.
///   a number: that node.
/// @param device by its link_node(), which may be a GPU's own node, and by whose page tables it uses; nothing
/// set if there is none. Throws ConfigError, naming the key numa and the nodes, for a number that is no node
/// with CPUs and memory.
HostNode choose_host_node(const NumaTopology& topology, const std::string& setting,
                          const DeviceCapabilities& device);

}  // namespace layerstream
