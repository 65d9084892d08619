#include "engine/parameter_groups.hpp"

#include <algorithm>

namespace layerstream {

ParameterGroups::ParameterGroups(const ModelLayout& layout, const WeightDecay& decay) {
  for (const BlockLayout& block : layout.blocks) {
    // What pads a parameter goes with it.
    std::vector<Range>& ranges = blocks_.emplace_back();
    for (const Parameter& parameter : block.parameters) {
      const std::optional<double> own_decay = decay.own_decay(parameter);
      const bool frozen = parameter.is_frozen;
      if (!ranges.empty() && ranges.back().own_decay == own_decay && ranges.back().is_frozen == frozen)
        continue;
      if (!ranges.empty()) ranges.back().end = parameter.offset;
      ranges.push_back({.end = block.num_elements, .own_decay = own_decay, .is_frozen = frozen});
    }
  }
}

std::vector<UpdateRange> ParameterGroups::ranges(int block, std::int64_t first, std::int64_t count,
                                                 double weight_decay) const {
  std::vector<UpdateRange> result;
  for (const Range& range : blocks_[static_cast<std::size_t>(block)]) {
    const std::int64_t end = std::min(range.end - first, count);
    std::optional<double> decay;
    if (!range.is_frozen) decay = range.own_decay.value_or(weight_decay);
    if (end <= 0 || (!result.empty() && end <= result.back().end)) continue;
    if (!result.empty() && result.back().weight_decay == decay) {
      result.back().end = end;
    } else {
      result.push_back({.end = end, .weight_decay = decay});
    }
  }
  return result;
}

std::map<double, std::int64_t> ParameterGroups::parameters_by_decay(const ModelLayout& layout,
                                                                    double weight_decay) const {
  std::map<double, std::int64_t> counts;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
      if (parameter.is_frozen) continue;
      const std::vector<UpdateRange> found = ranges(block, parameter.offset, 1, weight_decay);
      counts[*found.front().weight_decay] += parameter.numel();
    }
  }
  return counts;
}

}  // namespace layerstream
