#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/weight_decay_rule.hpp"
#include "model/layout.hpp"

namespace layerstream {

/// Which parameters are decayed by how much: matrices by weight_decay, norm weights and biases not at all,
/// and those that a rule fits by the last such rule's.
class WeightDecay {
 public:
  /// @param rules as weight_decay_rules has them. @pre each can be read. Throws ConfigError for one that fits
  /// no parameter of the layout.
  WeightDecay(const ModelLayout& layout, const std::vector<std::string>& rules);

  /// Nothing: weight_decay.
  std::optional<double> own_decay(const Parameter& parameter) const;

 private:
  std::vector<WeightDecayRule> rules_;
};

}  // namespace layerstream
