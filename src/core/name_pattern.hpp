#pragma once

#include <fnmatch.h>

#include <string>

namespace layerstream {

/// Whether a parameter's Hugging Face name fits a pattern of fnmatch(3): * any text, dots included; ? a
/// character; [abc] one of several.
inline bool fits_pattern(const std::string& name, const std::string& pattern) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

}  // namespace layerstream
