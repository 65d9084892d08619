#include "model/detail/hf_rope.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace layerstream::detail {
namespace {

/// The class default of all four families.
constexpr double default_theta = 10000.0;

constexpr std::array<std::pair<std::string_view, RopeType>, 6> rope_types = {
    {{"default", RopeType::standard},
     {"linear", RopeType::linear},
     {"dynamic", RopeType::dynamic},
     {"llama3", RopeType::llama3},
     {"yarn", RopeType::yarn},
     {"longrope", RopeType::longrope}}};

/// Every key that some rope type reads; transformers, like us, skips those that the type at hand does not
/// use. "finetuned" is a remark in the first yarn checkpoints that nothing reads.
constexpr std::array<std::string_view, 17> known_keys = {"type",
                                                         "rope_type",
                                                         "rope_theta",
                                                         "factor",
                                                         "low_freq_factor",
                                                         "high_freq_factor",
                                                         "beta_fast",
                                                         "beta_slow",
                                                         "original_max_position_embeddings",
                                                         "mscale",
                                                         "mscale_all_dim",
                                                         "attention_factor",
                                                         "truncate",
                                                         "short_factor",
                                                         "long_factor",
                                                         "partial_rotary_factor",
                                                         "finetuned"};

std::string_view rope_type_key(const ConfigObject& rope) {
  return rope.has("rope_type") || !rope.has("type") ? "rope_type" : "type";
}

RopeType parse_rope_type(const ConfigObject& rope) {
  const std::string_view key = rope_type_key(rope);
  const std::string name = rope.string(key).value_or("default");
  if (const auto other = rope.string("type"); other && *other != name) {
    rope.refuse("type", "contradicts rope_type '{}'; keep one of them", name);
  }
  for (const auto& [known, type] : rope_types) {
    if (name == known) return type;
  }
  rope.refuse(key, "unknown rope type; known are default, linear, dynamic, llama3, yarn, longrope{}",
              name == "su" ? " ('su' is an old name of longrope)" : "");
}

void refuse_partial_rotation(const ConfigObject& object) {
  if (object.number("partial_rotary_factor").value_or(1.0) != 1.0) {
    object.refuse("partial_rotary_factor", "only 1.0, the rotation of whole heads, is supported");
  }
}

double required_factor(const ConfigObject& rope, std::string_view key) {
  const auto factor = rope.positive_number(key);
  if (!factor) {
    rope.refuse(key, "rope type '{}' needs it", rope.string(rope_type_key(rope)).value_or("default"));
  }
  return *factor;
}

/// A scaling factor; below 1 it would compress the context, which no scheme means.
double at_least_one(const ConfigObject& rope, double factor) {
  if (factor < 1.0) rope.refuse("factor", "expected a number of at least 1");
  return factor;
}

double read_theta(const ConfigObject& config, const ConfigObject& rope) {
  const auto inside = rope.positive_number("rope_theta");
  const auto outside = config.positive_number("rope_theta");
  if (inside && outside && *inside != *outside) {
    rope.refuse("rope_theta", "contradicts the top-level rope_theta {}; keep one of them", *outside);
  }
  return inside ? *inside : outside.value_or(default_theta);
}

std::int64_t read_original_length(const ConfigObject& config, const ConfigObject& rope) {
  constexpr std::string_view key = "original_max_position_embeddings";
  const auto inside = rope.positive_integer(key);
  const auto outside = config.positive_integer(key);
  if (inside && outside && *inside != *outside) {
    rope.refuse(key, "contradicts the top-level {} {}; keep one of them", key, *outside);
  }
  return inside ? *inside : outside.value_or(0);
}

std::vector<double> read_longrope_factors(const ConfigObject& rope, std::string_view key,
                                          std::int64_t head_dim) {
  auto factors = rope.positive_numbers(key);
  if (!factors) rope.refuse(key, "rope type 'longrope' needs it");
  if (static_cast<std::int64_t>(factors->size()) != head_dim / 2) {
    rope.refuse(key, "expected head_dim / 2 = {} numbers, found {}", head_dim / 2, factors->size());
  }
  return *std::move(factors);
}

void read_llama3(const ConfigObject& rope, RopeSpec& spec) {
  spec.factor = at_least_one(rope, required_factor(rope, "factor"));
  spec.low_freq_factor = required_factor(rope, "low_freq_factor");
  spec.high_freq_factor = required_factor(rope, "high_freq_factor");
  if (spec.high_freq_factor <= spec.low_freq_factor) {
    rope.refuse("high_freq_factor", "must be greater than low_freq_factor {}", spec.low_freq_factor);
  }
  if (spec.original_max_position_embeddings == 0) {
    rope.refuse("original_max_position_embeddings", "rope type 'llama3' needs it");
  }
}

/// The factor of yarn and longrope; 0 leaves it to the ratio of the two context lengths.
double factor_or_ratio(const ConfigObject& rope, const RopeSpec& spec) {
  if (const auto factor = rope.positive_number("factor")) return at_least_one(rope, *factor);
  if (spec.original_max_position_embeddings == 0) {
    rope.refuse("factor", "expected it, or original_max_position_embeddings from which it follows");
  }
  return 0.0;
}

void read_yarn(const ConfigObject& rope, RopeSpec& spec) {
  spec.factor = factor_or_ratio(rope, spec);
  spec.attention_factor = rope.positive_number("attention_factor").value_or(spec.attention_factor);
  spec.beta_fast = rope.positive_number("beta_fast").value_or(spec.beta_fast);
  spec.beta_slow = rope.positive_number("beta_slow").value_or(spec.beta_slow);
  if (spec.beta_fast < spec.beta_slow) {
    rope.refuse("beta_fast", "must not be less than beta_slow {}", spec.beta_slow);
  }
  spec.mscale = rope.number("mscale").value_or(spec.mscale);
  spec.mscale_all_dim = rope.number("mscale_all_dim").value_or(spec.mscale_all_dim);
  spec.truncate = rope.boolean("truncate").value_or(spec.truncate);
}

void read_longrope(const ConfigObject& rope, std::int64_t head_dim, RopeSpec& spec) {
  spec.factor = factor_or_ratio(rope, spec);
  spec.attention_factor = rope.positive_number("attention_factor").value_or(spec.attention_factor);
  spec.short_factor = read_longrope_factors(rope, "short_factor", head_dim);
  spec.long_factor = read_longrope_factors(rope, "long_factor", head_dim);
}

RopeSpec parse_flat(const ConfigObject& config, const ConfigObject& rope, const RopeContext& context) {
  for (const std::string& key : rope.keys()) {
    if (std::find(known_keys.begin(), known_keys.end(), key) == known_keys.end()) {
      rope.refuse(key, "unknown rope key; remove it if the model does not need it");
    }
  }
  refuse_partial_rotation(rope);

  RopeSpec spec;
  spec.type = parse_rope_type(rope);
  spec.theta = read_theta(config, rope);
  switch (spec.type) {
    case RopeType::standard:
      return spec;
    case RopeType::linear:
    case RopeType::dynamic:
      spec.factor = at_least_one(rope, required_factor(rope, "factor"));
      return spec;
    case RopeType::llama3:
    case RopeType::yarn:
    case RopeType::longrope:
      break;
  }
  spec.original_max_position_embeddings = read_original_length(config, rope);
  if (spec.type == RopeType::llama3) read_llama3(rope, spec);
  if (spec.type == RopeType::yarn) read_yarn(rope, spec);
  if (spec.type == RopeType::longrope) read_longrope(rope, context.head_dim, spec);
  return spec;
}

/// `rope` is flat, or holds one object per layer type.
RopeSpec parse_object(const ConfigObject& config, const ConfigObject& rope, const RopeContext& context) {
  if (!rope.contains("full_attention") && !rope.contains("sliding_attention")) {
    return parse_flat(config, rope, context);
  }
  for (const std::string& key : rope.keys()) {
    if (key != "full_attention" && key != "sliding_attention") {
      rope.refuse(key, "stands beside parameters per layer type; move it into them");
    }
  }
  std::vector<RopeSpec> specs;
  for (const std::string& layer_type : context.layer_types) {
    const auto nested = rope.object(layer_type);
    if (!nested) rope.refuse(layer_type, "expected the rope parameters of these layers");
    specs.push_back(parse_flat(config, *nested, context));
    if (!(specs.back() == specs.front())) {
      rope.refuse(layer_type,
                  "differs from that of the other layers; only one rope for all layers is supported");
    }
  }
  return specs.front();
}

}  // namespace

RopeSpec parse_rope(const ConfigObject& config, const RopeContext& context) {
  refuse_partial_rotation(config);
  const nlohmann::json nothing = nlohmann::json::object();
  const ConfigObject absent(nothing, "", "");

  // An empty object is how some files spell "no scaling".
  auto scaling = config.object("rope_scaling");
  if (scaling && scaling->keys().empty()) scaling.reset();
  auto parameters = config.object("rope_parameters");
  if (parameters && parameters->keys().empty()) parameters.reset();

  if (!scaling) return parse_object(config, parameters.value_or(absent), context);
  const RopeSpec spec = parse_object(config, *scaling, context);
  if (parameters && !(parse_object(config, *parameters, context) == spec)) {
    config.refuse("rope_scaling", "contradicts rope_parameters; keep one of them");
  }
  return spec;
}

}  // namespace layerstream::detail
