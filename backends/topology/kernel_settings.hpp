#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "backends/topology/numa_topology.hpp"

namespace layerstream {

/// What of the kernel's configuration host memory and its copies feel.
struct KernelSettings {
  std::size_t page_bytes = 0;
  std::string transparent_huge_pages = {};  ///< "always", "madvise", "never"; empty: unknown
  /// kernel.numa_balancing: 0 off, 1 pages follow their users, 2 tiering, 3 both.
  std::optional<int> numa_balancing = {};

  std::string to_text() const;
};

/// Reads sys/kernel/numa_balancing below roots.proc and kernel/mm/transparent_hugepage below roots.sys.
/// Never throws.
KernelSettings read_kernel_settings(const SystemRoots& roots = {});

/// A sentence with the remedy for each setting that costs a run speed; empty when all is well.
/// @param shares_page_tables the device walks the host's page tables (DeviceCapabilities).
std::vector<std::string> kernel_warnings(const KernelSettings& settings, const NumaTopology& topology,
                                         bool shares_page_tables);
/// The same of the kernel's page size, which the system's administrator chose with the kernel; empty if it is
/// fine.
std::string page_size_warning(const KernelSettings& settings, bool shares_page_tables);

}  // namespace layerstream
