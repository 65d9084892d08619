#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/cgroup.hpp"

namespace layerstream {

/// The CPUs that this process may use.
struct CpuAllowance {
  std::vector<int> cpus;              ///< of the affinity mask, ascending; cpuset groups are part of it
  int online = 0;                     ///< CPUs of the machine
  std::optional<double> quota;        ///< CPUs' worth of time per period, the smallest of all groups
  std::string quota_file;             ///< where the quota is from
  std::vector<std::string> warnings;  ///< files that were missing or unreadable, and what was assumed

  /// Threads that can run at once: CPUs of the mask, no more than the quota; at least 1.
  int usable() const;
};

/// Reads the mask from /proc/self/status, quotas from cpu.max (v2) and cpu.cfs_quota_us (v1) of the
/// process's groups and all their ancestors.
CpuAllowance probe_cpus(const SystemRoots& roots = {});

/// What the OpenMP runtime was told; it takes its settings from the environment.
struct OpenMpSettings {
  std::optional<std::string> num_threads;  ///< OMP_NUM_THREADS
  std::optional<std::string> proc_bind;    ///< OMP_PROC_BIND
  std::optional<std::string> places;       ///< OMP_PLACES

  static OpenMpSettings of_this_process();
};

/// One sentence for each thing that starves the host threads (optimizer, data, CPU kernels): an affinity
/// mask or quota smaller than the machine, OMP_NUM_THREADS = 1 or above the usable CPUs, a binding that
/// has already pinned the main thread (threads made later inherit its mask). Empty when all is well.
std::vector<std::string> thread_warnings(const CpuAllowance& allowance, const OpenMpSettings& openmp);

/// "0-3,8" → 0 1 2 3 8; nothing if malformed. (cpuset(7), list format.)
std::optional<std::vector<int>> parse_cpu_list(std::string_view text);

/// The inverse of parse_cpu_list, for ascending CPUs.
std::string format_cpu_list(const std::vector<int>& cpus);

}  // namespace layerstream
