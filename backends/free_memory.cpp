#include "backends/free_memory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/ledger.hpp"

namespace layerstream {

FreeDeviceMemory free_memory_of(const Device& device) {
  const std::size_t total = device.total_memory();
  return {.free = total - std::min(total, device.used_bytes()), .total = total};
}

std::string free_memory_warning(const Device& device) {
  constexpr double enough = 0.9;
  if (device.uses_host_memory()) return {};
  const FreeDeviceMemory memory = free_memory_of(device);
  if (memory.share() >= enough) return {};
  const std::string files =
      device.capabilities().shares_host_page_tables
          ? ", or pages of files that were read before, which the kernel may keep in the device's memory and older "
            "drivers do not give back (sync; echo 3 > /proc/sys/vm/drop_caches)"
          : "";
  return fmt::format(
      "{} of {} of device memory are free before this run takes any: another process holds the rest "
      "(nvidia-smi shows it){}",
      format_bytes(memory.free), format_bytes(memory.total), files);
}

}  // namespace layerstream
