#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "profiles/hardware/hardware_profile.hpp"

namespace layerstream {

/// Names of the profiles that are part of the program: the files of this folder without their ending.
std::vector<std::string> shipped_profile_names();

/// The profile with that name, if there is one.
std::optional<HardwareProfile> shipped_profile(std::string_view name);

/// Of the profiles of the device that `device_description` begins with the name of, that with the memories
/// nearest to these; none if there is no such device.
std::optional<HardwareProfile> shipped_profile_for(std::string_view device_description, double device_bytes,
                                                   double host_bytes);

/// A profile by name, or from a file. Throws ConfigError that lists the names if it is neither.
HardwareProfile find_hardware_profile(const std::string& name_or_path);

}  // namespace layerstream
