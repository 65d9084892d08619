#include "engine/weight_decay.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/weight_decay_rule.hpp"

namespace layerstream {
namespace {

std::vector<WeightDecayRule> read_rules(const std::vector<std::string>& texts) {
  std::vector<WeightDecayRule> rules;
  for (const std::string& text : texts) {
    std::optional<WeightDecayRule> rule = parse_weight_decay_rule(text);
    LAYERSTREAM_EXPECT(rule.has_value(), "weight_decay_rules: {}", text);
    rules.push_back(std::move(*rule));
  }
  return rules;
}

}  // namespace

WeightDecay::WeightDecay(const ModelLayout& layout, const std::vector<std::string>& rules) {
  const std::vector<WeightDecayRule> read = read_rules(rules);
  for (const WeightDecayRule& rule : read) check_pattern(layout, rule.pattern, "weight_decay_rules");
  const auto decay_of = [&](const Parameter& parameter) -> std::optional<double> {
    const auto rule = std::find_if(read.rbegin(), read.rend(), [&](const WeightDecayRule& candidate) {
      return candidate.fits(parameter.name);
    });
    if (rule != read.rend()) return rule->decay;
    if (parameter.is_matrix) return {};
    return 0.0;
  };
  for (const BlockLayout& block : layout.blocks) {
    // What pads a parameter goes with it.
    std::vector<Range>& ranges = blocks_.emplace_back();
    for (const Parameter& parameter : block.parameters) {
      const std::optional<double> decay = decay_of(parameter);
      const bool frozen = parameter.is_frozen;
      if (!ranges.empty() && ranges.back().decay == decay && ranges.back().is_frozen == frozen) continue;
      if (!ranges.empty()) ranges.back().end = parameter.offset;
      ranges.push_back({.end = block.num_elements, .decay = decay, .is_frozen = frozen});
    }
  }
}

std::vector<DecayRange> WeightDecay::ranges(int block, std::int64_t first, std::int64_t count,
                                            double weight_decay) const {
  std::vector<DecayRange> result;
  for (const Range& range : blocks_[static_cast<std::size_t>(block)]) {
    const std::int64_t end = std::min(range.end - first, count);
    std::optional<double> decay;
    if (!range.is_frozen) decay = range.decay.value_or(weight_decay);
    if (end <= 0 || (!result.empty() && end <= result.back().end)) continue;
    if (!result.empty() && result.back().decay == decay) {
      result.back().end = end;
    } else {
      result.push_back({.end = end, .decay = decay});
    }
  }
  return result;
}

std::map<double, std::int64_t> WeightDecay::groups(const ModelLayout& layout, double weight_decay) const {
  std::map<double, std::int64_t> counts;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
      if (parameter.is_frozen) continue;
      counts[*ranges(block, parameter.offset, 1, weight_decay).front().decay] += parameter.numel();
    }
  }
  return counts;
}

}  // namespace layerstream
