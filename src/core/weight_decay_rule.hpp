#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace layerstream {

/// Another weight decay for some parameters: those whose Hugging Face name fits the pattern.
struct WeightDecayRule {
  std::string pattern;  ///< of fnmatch(3): * any text, dots included; ? a character; [abc] one of several
  double decay = 0.0;   ///< >= 0

  bool fits(const std::string& parameter) const;
};

/// Reads "pattern=decay"; nothing if it is not that.
std::optional<WeightDecayRule> parse_weight_decay_rule(std::string_view text);

}  // namespace layerstream
