#include "engine/weight_decay.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace layerstream {

WeightDecay::WeightDecay(const ModelLayout& layout, const std::vector<std::string>& rules) {
  for (const std::string& text : rules) {
    std::optional<WeightDecayRule> rule = parse_weight_decay_rule(text);
    LAYERSTREAM_EXPECT(rule.has_value(), "weight_decay_rules: {}", text);
    check_pattern(layout, rule->pattern, "weight_decay_rules");
    rules_.push_back(std::move(*rule));
  }
}

std::optional<double> WeightDecay::own_decay(const Parameter& parameter) const {
  const auto rule = std::find_if(rules_.rbegin(), rules_.rend(), [&](const WeightDecayRule& candidate) {
    return candidate.fits(parameter.name);
  });
  if (rule != rules_.rend()) return rule->decay;
  if (parameter.is_matrix) return {};
  return 0.0;
}

}  // namespace layerstream
