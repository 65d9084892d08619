#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/cgroup.hpp"

namespace layerstream {

/// A memory node as the kernel lists it.
struct NumaNode {
  int id = 0;
  std::vector<int> cpus = {};           ///< ascending; empty: memory alone (a GPU's, CXL) or nothing at all
  std::uint64_t memory_bytes = 0;       ///< MemTotal
  std::map<int, int> distance_to = {};  ///< by node id, as the firmware says (ACPI SLIT: 10 is local)

  bool has_cpus() const { return !cpus.empty(); }
  bool has_memory() const { return memory_bytes > 0; }
  /// Whether host memory may be bound to it.
  bool is_host() const { return has_cpus() && has_memory(); }
};

/// The memory nodes of a machine.
struct NumaTopology {
  /// Ascending ids. None, and complete: the kernel lists none (it is built without NUMA), which is one node.
  std::vector<NumaNode> nodes = {};
  /// CPUs and memory of every node that is online are known; only then is a choice among them safe.
  bool complete = false;
  /// Files that are malformed, or missing where others are there, and what follows.
  std::vector<std::string> warnings = {};

  /// Null if there is no such node.
  const NumaNode* find(int id) const;
  /// Nodes with memory, with or without CPUs.
  int num_with_memory() const;
  /// "node 0: CPUs 0-71, 480 GiB; node 1: no CPUs, 95.0 GiB"; nodes with neither are counted. "one memory
  /// node (the kernel lists none)".
  std::string to_text() const;
};

/// Reads devices/system/node below roots.sys. Never throws: what is missing or malformed there is a
/// warning; the whole folder is missing where the kernel is built without NUMA.
NumaTopology read_numa_topology(const SystemRoots& roots = {});

}  // namespace layerstream
