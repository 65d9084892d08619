#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/cgroup.hpp"

namespace layerstream {

/// How much host memory this process may still take.
struct HostMemory {
  std::uint64_t available = 0;        ///< bytes
  std::string bound_by;               ///< the file whose figure is the smallest
  std::vector<std::string> warnings;  ///< files that were missing or unreadable, and what was assumed
};

/// Reads what the system says about memory; `host_memory_limit`, which overrides it, is the caller's.
class HostMemoryProbe {
 public:
  explicit HostMemoryProbe(SystemRoots roots = {}) : roots_(std::move(roots)) {}

  /// The smallest of MemAvailable (/proc/meminfo) and, for each control group that holds this process,
  /// limit − usage, where inactive file cache, which the kernel gives back, is not usage. Where a figure
  /// is missing the answer errs on the small side (0 if nothing is known) and a warning says so.
  HostMemory available() const;

  /// The same, further bound by what is free or inactive file cache on one NUMA node.
  HostMemory available_on_node(int node) const;

 private:
  SystemRoots roots_;
};

}  // namespace layerstream
