#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longctx/rope.hpp"
#include "model/detail/hf_json.hpp"

namespace layerstream::detail {

/// What the rotary embedding of a model depends on besides its own keys.
struct RopeContext {
  std::int64_t head_dim = 0;
  /// "full_attention" and "sliding_attention", those that some layer has.
  std::vector<std::string> layer_types;
};

/// Reads `rope_theta`, `rope_scaling` and `rope_parameters` (also one object per layer type, when those of
/// all layers agree). Keys and defaults are those of transformers' modeling_rope_utils. Two spellings that
/// contradict each other are refused, as is what is unknown.
RopeSpec parse_rope(const ConfigObject& config, const RopeContext& context);

}  // namespace layerstream::detail
