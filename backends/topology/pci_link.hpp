#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/cgroup.hpp"

namespace layerstream {

/// A speed and width of a PCI Express link.
struct PciRate {
  double gigatransfers = 0.0;  ///< a second and lane, 10⁹
  int lanes = 0;

  /// "5.0" for 32 GT/s; "?" for a speed that no generation has.
  std::string generation() const;
  /// "PCIe 5.0 x16".
  std::string to_text() const;
  /// Payload each way after line coding (8b/10b below 8 GT/s, then 128b/130b, then flits of PCIe 6.0, whose
  /// 242 of 256 bytes carry packets); packet headers take some 5 to 15% of it.
  double bytes_per_second() const;
};

/// How a device hangs on the host, as the kernel says. On a module with NVLink-C2C (Grace Hopper) bulk data
/// does not take this way.
struct PciLink {
  std::string address = {};             ///< "0000:19:00.0"
  std::optional<int> numa_node = {};    ///< none: the kernel does not know one
  std::optional<PciRate> current = {};  ///< idle GPUs may lower the speed
  std::optional<PciRate> maximum = {};
  /// Fewer lanes than the device has: a fault of slot or riser. A lower generation is said mildly.
  std::vector<std::string> warnings = {};
  std::vector<std::string> notes = {};

  /// "PCIe 5.0 x16", "PCIe link unknown".
  std::string description() const;
  /// Can be a generation more than `current` once the device works.
  double bytes_per_second() const;
};

/// Reads bus/pci/devices/<address> below roots.sys. Never throws; what is missing stays unknown.
/// @param address domain:bus:device.function in hexadecimal; nothing is known of an empty one.
PciLink read_pci_link(const std::string& address, const SystemRoots& roots = {});

}  // namespace layerstream
