#include "core/weight_decay_rule.hpp"

#include "core/config_value.hpp"

namespace layerstream {

std::optional<WeightDecayRule> parse_weight_decay_rule(std::string_view text) {
  const std::size_t equals = text.rfind('=');
  if (equals == std::string_view::npos || equals == 0) return {};
  const std::optional<double> decay = parse_real(text.substr(equals + 1));
  if (!decay || *decay < 0) return {};
  return WeightDecayRule{.pattern = std::string(text.substr(0, equals)), .decay = *decay};
}

}  // namespace layerstream
