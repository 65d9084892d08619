#include "profiles/hardware/shipped_profiles.hpp"

#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>
#include <system_error>

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

namespace {

/// "NVIDIA H200 (sm_90), …" and "NVIDIA GH200 480GB (sm_90), …" are their names with what may follow: a size
/// of memory. "NVIDIA H200 NVL" is another card.
bool is_description_of(std::string_view name, std::string_view description) {
  if (!description.starts_with(name)) return false;
  const std::string_view rest = description.substr(name.size());
  return rest.empty() || rest.starts_with(" (") ||
         (rest.size() > 1 && rest[0] == ' ' && rest[1] >= '0' && rest[1] <= '9');
}

}  // namespace

std::optional<HardwareProfile> shipped_profile_for(std::string_view device_description, double device_bytes,
                                                   double host_bytes) {
  std::optional<HardwareProfile> nearest;
  const auto distance = [&](const HardwareProfile& profile) {
    return std::abs(std::log(profile.device.memory_bytes.value / device_bytes)) +
           std::abs(std::log(profile.host.memory_bytes.value / host_bytes));
  };
  for (const ProfileText& text : profile_texts()) {
    HardwareProfile profile = parse_hardware_profile(text.yaml, text.name);
    if (!is_description_of(profile.device.name, device_description)) continue;
    if (!nearest || distance(profile) < distance(*nearest)) nearest = std::move(profile);
  }
  return nearest;
}

HardwareProfile find_hardware_profile(const std::string& name_or_path) {
  if (std::optional<HardwareProfile> shipped = shipped_profile(name_or_path)) return *std::move(shipped);
  std::error_code problem;
  if (std::filesystem::exists(name_or_path, problem)) return load_hardware_profile(name_or_path);
  throw ConfigError(fmt::format(
      "hardware_profile: {} is no file{} and no shipped profile; those are {}. `layerstream calibrate` measures "
      "one of this machine",
      name_or_path, problem ? fmt::format(" that can be looked for ({})", problem.message()) : "",
      fmt::join(shipped_profile_names(), ", ")));
}

}  // namespace layerstream
