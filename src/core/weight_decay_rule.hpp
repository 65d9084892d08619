#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/name_pattern.hpp"

namespace layerstream {

/// Another weight decay for some parameters: those whose Hugging Face name fits the pattern.
struct WeightDecayRule {
  std::string pattern;  ///< see fits_pattern
  double decay = 0.0;   ///< >= 0

  bool fits(const std::string& parameter) const { return fits_pattern(parameter, pattern); }
};

/// Reads "pattern=decay"; nothing if it is not that.
std::optional<WeightDecayRule> parse_weight_decay_rule(std::string_view text);

}  // namespace layerstream
