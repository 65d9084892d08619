#pragma once

#include <string>

#include "core/cgroup.hpp"

namespace layerstream {

/// What the system says of its memory nodes, of the device's PCI link and of the settings that matter, file
/// by file as `tail -n +1 FILES` prints them with paths from the root on: for a report that is sent in, and
/// for tests, which unfold it into a tree again (tests/backends/fixtures). Files that do not exist are left
/// out.
/// @param pci_address of the device; may be empty.
std::string record_system(const std::string& pci_address, const SystemRoots& roots = {});

}  // namespace layerstream
