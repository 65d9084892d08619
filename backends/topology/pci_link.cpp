#include "backends/topology/pci_link.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <sstream>

namespace layerstream {
namespace fs = std::filesystem;

namespace {

struct Generation {
  double gigatransfers;
  const char* name;
  double coding;  ///< payload of what is sent
};
constexpr std::array generations{Generation{2.5, "1.0", 0.8},
                                 Generation{5.0, "2.0", 0.8},
                                 Generation{8.0, "3.0", 128.0 / 130.0},
                                 Generation{16.0, "4.0", 128.0 / 130.0},
                                 Generation{32.0, "5.0", 128.0 / 130.0},
                                 Generation{64.0, "6.0", 242.0 / 256.0},
                                 Generation{128.0, "7.0", 242.0 / 256.0}};

const Generation* generation_of(double gigatransfers) {
  const auto at = std::ranges::find(generations, gigatransfers, &Generation::gigatransfers);
  return at == generations.end() ? nullptr : &*at;
}

/// "32.0 GT/s PCIe", "8 GT/s" (before Linux 5.7); nothing for "Unknown".
std::optional<double> speed_of(const fs::path& file) {
  std::istringstream text(read_kernel_file(file).value_or(""));
  double speed = 0.0;
  std::string unit;
  if (!(text >> speed >> unit) || unit != "GT/s" || !(speed > 0.0)) return std::nullopt;
  return speed;
}

/// Lanes; a link that is down or unknown says 0 or 255.
std::optional<int> width_of(const fs::path& file) {
  const auto width = parse_kernel_number(read_kernel_file(file).value_or(""));
  if (!width || *width < 1 || *width > 32) return std::nullopt;
  return static_cast<int>(*width);
}

std::optional<PciRate> rate_of(const fs::path& folder, const std::string& which) {
  const auto speed = speed_of(folder / (which + "_link_speed"));
  const auto width = width_of(folder / (which + "_link_width"));
  if (!speed || !width) return std::nullopt;
  return PciRate{.gigatransfers = *speed, .lanes = *width};
}

}  // namespace

std::string PciRate::generation() const {
  const Generation* const generation = generation_of(gigatransfers);
  return generation == nullptr ? "?" : generation->name;
}

std::string PciRate::to_text() const {
  return fmt::format("PCIe {} x{}", generation(), lanes);
}

double PciRate::bytes_per_second() const {
  const Generation* const generation = generation_of(gigatransfers);
  return generation == nullptr ? 0.0 : 1e9 / 8.0 * gigatransfers * lanes * generation->coding;
}

std::string PciLink::description() const {
  return current ? current->to_text() : "PCIe link unknown";
}

double PciLink::bytes_per_second() const {
  if (!current) return 0.0;
  PciRate awake = *current;
  if (maximum) awake.gigatransfers = std::max(awake.gigatransfers, maximum->gigatransfers);
  return awake.bytes_per_second();
}

PciLink read_pci_link(const std::string& address, const SystemRoots& roots) {
  PciLink link{.address = address};
  if (address.empty()) return link;
  const fs::path folder = roots.sys / "bus/pci/devices" / address;
  const auto node = parse_kernel_number(read_kernel_file(folder / "numa_node").value_or(""));
  if (node && *node >= 0 && *node < (1 << 20)) link.numa_node = static_cast<int>(*node);
  link.current = rate_of(folder, "current");
  link.maximum = rate_of(folder, "max");
  if (!link.current || !link.maximum) return link;
  if (link.current->lanes < link.maximum->lanes) {
    link.warnings.push_back(fmt::format(
        "the link runs with {} of {} lanes ({}), so copies are that much slower: check slot, riser and the "
        "firmware's bifurcation setting",
        link.current->lanes, link.maximum->lanes, address));
  }
  if (link.current->gigatransfers < link.maximum->gigatransfers) {
    link.notes.push_back(fmt::format("PCIe {} now, {} at most: idle devices lower it until they work",
                                     link.current->generation(), link.maximum->generation()));
  }
  return link;
}

}  // namespace layerstream
