#include "backends/topology/kernel_settings.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include "core/ledger.hpp"

namespace layerstream {
namespace {

/// "always [madvise] never": the one in brackets.
std::string chosen_of(const std::string& text) {
  const std::size_t begin = text.find('[');
  const std::size_t end = text.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return {};
  return text.substr(begin + 1, end - begin - 1);
}

}  // namespace

std::string KernelSettings::to_text() const {
  return fmt::format("pages of {}, transparent huge pages {}, automatic NUMA balancing {}",
                     format_bytes(page_bytes),
                     transparent_huge_pages.empty() ? "unknown" : transparent_huge_pages,
                     numa_balancing ? fmt::format("{}", *numa_balancing) : "unknown");
}

KernelSettings read_kernel_settings(const SystemRoots& roots) {
  KernelSettings settings;
  settings.page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  settings.transparent_huge_pages =
      chosen_of(read_kernel_file(roots.sys / "kernel/mm/transparent_hugepage/enabled").value_or(""));
  const auto balancing =
      parse_kernel_number(read_kernel_file(roots.proc / "sys/kernel/numa_balancing").value_or(""));
  if (balancing && *balancing >= 0 && *balancing <= 3) settings.numa_balancing = static_cast<int>(*balancing);
  return settings;
}

std::vector<std::string> kernel_warnings(const KernelSettings& settings, const NumaTopology& topology,
                                         bool shares_page_tables) {
  std::vector<std::string> warnings;
  if (settings.numa_balancing.value_or(0) != 0 && topology.num_with_memory() > 1) {
    warnings.push_back(fmt::format(
        "kernel.numa_balancing is {} on a machine with {} memory nodes: the kernel unmaps pages to see who uses "
        "them, and moves them{}; sysctl kernel.numa_balancing=0",
        *settings.numa_balancing, topology.num_with_memory(),
        shares_page_tables ? " while the device works on them, which then waits for a page fault" : ""));
  }
  if (settings.transparent_huge_pages == "never") {
    warnings.push_back(
        "transparent huge pages are off: host memory takes longer to make ready, and its addresses to "
        "translate; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  }
  return warnings;
}

std::string page_size_warning(const KernelSettings& settings, bool shares_page_tables) {
  constexpr std::size_t small_page = 4096;
  if (!shares_page_tables || settings.page_bytes > small_page) return {};
  return "the kernel has pages of 4 KiB: a device that walks the host's page tables is faster with a kernel of "
         "64 KiB pages (NVIDIA's advice for Grace Hopper; Ubuntu: linux-nvidia-64k)";
}

}  // namespace layerstream
