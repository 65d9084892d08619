#pragma once

#include <span>
#include <string_view>

namespace layerstream {

struct ProfileText {
  std::string_view name;
  std::string_view yaml;
};

/// The YAML files of this folder, as they were when the program was built.
std::span<const ProfileText> profile_texts();

}  // namespace layerstream
