#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "engine/weight_decay.hpp"
#include "model/layout.hpp"

namespace layerstream {

/// Elements that lie side by side, up to `end`, and are updated alike, or not at all.
struct UpdateRange {
  std::int64_t end = 0;
  std::optional<double> weight_decay = 0.0;  ///< nothing: they are frozen

  bool operator==(const UpdateRange&) const = default;
};

/// What the optimizer does with which parameters, as the parameter groups of torch.optim say it: the frozen
/// ones stay, the others are updated with a weight decay each. Found by elements of a block's slab, as that
/// is what is updated.
class ParameterGroups {
 public:
  ParameterGroups(const ModelLayout& layout, const WeightDecay& decay);

  /// Of `count` elements from `first` on of the block's slab, counted from `first`: neighbours differ, and
  /// the last ends at `count`. @param weight_decay of parameters without one of their own.
  std::vector<UpdateRange> ranges(int block, std::int64_t first, std::int64_t count,
                                  double weight_decay) const;

  /// How many trained parameters have each decay.
  std::map<double, std::int64_t> parameters_by_decay(const ModelLayout& layout, double weight_decay) const;

 private:
  /// Up to `end`; trained without a decay of its own: weight_decay.
  struct Range {
    std::int64_t end;
    std::optional<double> own_decay;
    bool is_frozen;
  };
  std::vector<std::vector<Range>> blocks_;
};

}  // namespace layerstream
