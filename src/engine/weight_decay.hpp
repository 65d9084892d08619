#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/layout.hpp"
#include "ops/adamw.hpp"

namespace layerstream {

/// Elements that lie side by side, up to `end`, and share a decay, or are all frozen.
struct DecayRange {
  std::int64_t end = 0;
  std::optional<double> decay = 0.0;  ///< nothing: they are not updated

  bool operator==(const DecayRange&) const = default;
};

/// Which parameters are decayed by how much: matrices by weight_decay, norm weights and biases not at all,
/// and those that a rule fits by the last such rule's.
class WeightDecay {
 public:
  /// @param rules as weight_decay_rules has them. @pre each can be read. Throws ConfigError for one that fits
  /// no parameter.
  WeightDecay(const ModelLayout& layout, const std::vector<std::string>& rules);

  /// Of `count` elements from `first` on of the block's slab, counted from `first`: neighbours differ, and
  /// the last ends at `count`. @param weight_decay of matrices.
  std::vector<DecayRange> ranges(int block, std::int64_t first, std::int64_t count,
                                 double weight_decay) const;

  /// How many trained parameters have each decay.
  std::map<double, std::int64_t> groups(const ModelLayout& layout, double weight_decay) const;

 private:
  /// Up to `end`; trained without a decay of its own: weight_decay.
  struct Range {
    std::int64_t end;
    std::optional<double> decay;
    bool is_frozen;
  };
  std::vector<std::vector<Range>> blocks_;
};

}  // namespace layerstream
