#pragma once

#include <vector>

#include "doctor/check.hpp"

namespace layerstream::doctor {

/// What the operating system says and how it is set up.
std::vector<Check> system_checks();
/// What the device says of itself, and what follows.
std::vector<Check> device_checks();
/// What copies between host and device do.
std::vector<Check> copy_checks();
/// What kernels do with host memory.
std::vector<Check> kernel_checks();

/// All, in the order in which they are read best. A new group is listed here.
std::vector<Check> all_checks();

}  // namespace layerstream::doctor
