#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <algorithm>

#include "backends/topology/kernel_settings.hpp"
#include "core/affinity.hpp"
#include "core/host_memory.hpp"
#include "core/ledger.hpp"
#include "doctor/checks.hpp"

namespace layerstream::doctor {
namespace {

Verdict warn_if(bool condition) {
  return condition ? Verdict::warn : Verdict::ok;
}

std::string joined(const std::vector<std::string>& sentences) {
  return fmt::format("{}", fmt::join(sentences, "; "));
}

Finding memory_nodes(const Patient& patient) {
  const HostNode& chosen = patient.host_node;
  const auto hosts = std::ranges::count_if(patient.topology.nodes, &NumaNode::is_host);
  Finding finding{.verdict = warn_if(!chosen.warnings.empty() || !patient.topology.complete),
                  .found = fmt::format("{}; host buffers: {}", patient.topology.to_text(), chosen.to_text()),
                  .expected = "host buffers on the CPUs' node at which the device's link ends"};
  // With numa: off the choice has no warnings of its own.
  std::vector<std::string> remedies = chosen.warnings.empty() ? patient.topology.warnings : chosen.warnings;
  if (!chosen.node && hosts > 1 && patient.has_gpu()) {
    finding.verdict = Verdict::warn;
    remedies.push_back("set numa to the node nearest to the device (nvidia-smi topo -m: NUMA Affinity)");
  }
  if (patient.device != nullptr) {
    const DeviceCapabilities capabilities = patient.device->capabilities();
    if (capabilities.numa_node && capabilities.host_numa_id &&
        *capabilities.numa_node != *capabilities.host_numa_id) {
      finding.verdict = Verdict::warn;
      remedies.push_back(
          fmt::format("the kernel says that the link ends at node {}, the driver says {}; set numa "
                      "to the one whose copies are faster",
                      *capabilities.numa_node, *capabilities.host_numa_id));
    }
  }
  finding.remedy = joined(remedies);
  return finding;
}

Finding host_threads(const Patient& patient) {
  const CpuAllowance allowance = probe_cpus(patient.roots);
  std::vector<std::string> warnings = thread_warnings(allowance, OpenMpSettings::of_this_process());
  if (const NumaNode* const node =
          patient.host_node.node ? patient.topology.find(*patient.host_node.node) : nullptr) {
    const bool none_there = std::ranges::none_of(
        allowance.cpus, [&](int cpu) { return std::ranges::binary_search(node->cpus, cpu); });
    if (none_there) {
      warnings.push_back(
          fmt::format("no allowed CPU belongs to NUMA node {}, on which host buffers lie; start with "
                      "numactl --cpunodebind={}",
                      node->id, node->id));
    }
  }
  return {.verdict = warn_if(!warnings.empty()),
          .found = fmt::format("{} of {} CPUs allowed ({}), {} threads", allowance.cpus.size(),
                               allowance.online, format_cpu_list(allowance.cpus), allowance.usable()),
          .expected = "all CPUs of the node that host buffers lie on",
          .remedy = joined(warnings)};
}

Finding kernel_settings(const Patient& patient) {
  const KernelSettings settings = read_kernel_settings(patient.roots);
  const std::vector<std::string> warnings =
      kernel_warnings(settings, patient.topology, patient.shares_page_tables());
  return {.verdict = warn_if(!warnings.empty()),
          .found = settings.to_text(),
          .expected = "huge pages always or madvise; balancing 0 where there are several memory nodes",
          .remedy = joined(warnings)};
}

Finding page_size(const Patient& patient) {
  const KernelSettings settings = read_kernel_settings(patient.roots);
  const std::string warning = page_size_warning(settings, patient.shares_page_tables());
  return {.verdict = warn_if(!warning.empty()),
          .found = format_bytes(settings.page_bytes),
          .expected = patient.shares_page_tables() ? "64 KiB" : "",
          .remedy = warning};
}

Finding memory_limits(const Patient& patient) {
  const HostMemoryProbe probe(patient.roots);
  const HostMemory all = probe.available();
  std::vector<std::string> warnings = all.warnings;
  std::string found = fmt::format("{} available ({})", format_bytes(all.available), all.bound_by);
  if (patient.host_node.node) {
    const HostMemory there = probe.available_on_node(*patient.host_node.node);
    found += fmt::format(", {} on NUMA node {} ({})", format_bytes(there.available), *patient.host_node.node,
                         there.bound_by);
  }
  rlimit locked{};
  const bool known = getrlimit(RLIMIT_MEMLOCK, &locked) == 0;
  const bool unlimited = known && locked.rlim_cur == RLIM_INFINITY;
  found += fmt::format(", {} may be locked", !known      ? "an unknown amount"
                                             : unlimited ? "any amount"
                                                         : format_bytes(locked.rlim_cur));
  // cudaHostRegister is not held to it by every driver: the copies of registered memory below have the last
  // word.
  return {.verdict = warn_if(!warnings.empty()),
          .found = found,
          .expected = "what `layerstream plan` says a run needs",
          .remedy = joined(warnings)};
}

}  // namespace

std::vector<Check> system_checks() {
  return {{.name = "memory nodes", .run = memory_nodes},
          {.name = "host threads", .run = host_threads},
          {.name = "kernel settings", .run = kernel_settings},
          {.name = "page size", .run = page_size},
          {.name = "memory limits", .run = memory_limits}};
}

}  // namespace layerstream::doctor
