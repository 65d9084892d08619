#include "profiles/hardware/shipped_profiles.hpp"

#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>

#include "core/error.hpp"
#include "profiles/hardware/profile_texts.hpp"

namespace layerstream {

std::vector<std::string> shipped_profile_names() {
  std::vector<std::string> names;
  for (const ProfileText& profile : profile_texts()) names.emplace_back(profile.name);
  return names;
}

std::optional<HardwareProfile> shipped_profile(std::string_view name) {
  for (const ProfileText& profile : profile_texts()) {
    if (profile.name == name) return parse_hardware_profile(profile.yaml, profile.name);
  }
  return {};
}

std::optional<HardwareProfile> shipped_profile_for(std::string_view device_description, double device_bytes,
                                                   double host_bytes) {
  std::optional<HardwareProfile> nearest;
  const auto distance = [&](const HardwareProfile& profile) {
    return std::abs(std::log(profile.device.memory_bytes.value / device_bytes)) +
           std::abs(std::log(profile.host.memory_bytes.value / host_bytes));
  };
  for (const ProfileText& text : profile_texts()) {
    HardwareProfile profile = parse_hardware_profile(text.yaml, text.name);
    if (device_description.find(profile.device.name) == std::string_view::npos) continue;
    if (!nearest || distance(profile) < distance(*nearest)) nearest = std::move(profile);
  }
  return nearest;
}

HardwareProfile find_hardware_profile(const std::string& name_or_path) {
  if (std::optional<HardwareProfile> shipped = shipped_profile(name_or_path)) return *std::move(shipped);
  if (std::filesystem::exists(name_or_path)) return load_hardware_profile(name_or_path);
  throw ConfigError(fmt::format(
      "hardware_profile: {} is no file and no shipped profile; those are {}. `layerstream calibrate` measures "
      "one of this machine",
      name_or_path, fmt::join(shipped_profile_names(), ", ")));
}

}  // namespace layerstream
