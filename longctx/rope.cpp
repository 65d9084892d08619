#include "longctx/rope.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>

#include "core/error.hpp"

namespace layerstream {
namespace {

struct Model {
  std::int64_t head_dim;
  std::int64_t max_positions;       // max_position_embeddings
  std::int64_t original_positions;  // original_max_position_embeddings, or the above
  std::int64_t sequence_length;
};

template <class... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw ConfigError(fmt::format(format, std::forward<Args>(args)...));
}

void require_scale(const RopeSpec& rope, const char* type) {
  require(std::isfinite(rope.factor) && rope.factor >= 1.0,
          "rope_parameters.factor: {} needs a number >= 1, got {} (0: absent)", type, rope.factor);
}

void require_factors(const std::vector<double>& factors, const char* key, std::int64_t pairs) {
  require(std::ssize(factors) == pairs, "rope_parameters.{}: needs head_dim / 2 = {} numbers, got {}", key,
          pairs, factors.size());
  for (std::size_t i = 0; i < factors.size(); ++i)
    require(std::isfinite(factors[i]) && factors[i] > 0.0,
            "rope_parameters.{}[{}]: must be a positive number, got {}", key, i, factors[i]);
}

void check(const RopeSpec& rope, const Model& model) {
  require(model.head_dim >= 2 && model.head_dim % 2 == 0,
          "head_dim: rotary embedding needs an even number, got {}", model.head_dim);
  require(model.max_positions > 0, "max_position_embeddings: must be positive, got {}", model.max_positions);
  require(model.sequence_length > 0, "sequence length: must be positive, got {}", model.sequence_length);
  require(model.original_positions > 0,
          "rope_parameters.original_max_position_embeddings: must be positive, got {}",
          model.original_positions);
  require(std::isfinite(rope.theta) && rope.theta > 0.0, "rope_theta: must be a positive number, got {}",
          rope.theta);
  require(std::isfinite(rope.attention_factor) && rope.attention_factor >= 0.0,
          "rope_parameters.attention_factor: must be positive, or 0 to derive it, got {}",
          rope.attention_factor);
  switch (rope.type) {
    case RopeType::standard:
      return;
    case RopeType::linear:
      return require_scale(rope, "linear");
    case RopeType::dynamic:
      require_scale(rope, "dynamic");
      require(model.head_dim > 2, "head_dim: dynamic rope needs more than 2, got {}", model.head_dim);
      return;
    case RopeType::llama3:
      require_scale(rope, "llama3");
      require(std::isfinite(rope.low_freq_factor) && rope.low_freq_factor > 0.0,
              "rope_parameters.low_freq_factor: must be a positive number, got {}", rope.low_freq_factor);
      require(std::isfinite(rope.high_freq_factor) && rope.high_freq_factor > rope.low_freq_factor,
              "rope_parameters.high_freq_factor: must exceed low_freq_factor = {}, got {}",
              rope.low_freq_factor, rope.high_freq_factor);
      return;
    case RopeType::yarn:
      if (rope.factor != 0.0) require_scale(rope, "yarn");
      require(rope.theta > 1.0, "rope_theta: yarn needs more than 1, got {}", rope.theta);
      require(std::isfinite(rope.beta_slow) && rope.beta_slow > 0.0,
              "rope_parameters.beta_slow: must be a positive number, got {}", rope.beta_slow);
      require(std::isfinite(rope.beta_fast) && rope.beta_fast >= rope.beta_slow,
              "rope_parameters.beta_fast: must be at least beta_slow = {}, got {}", rope.beta_slow,
              rope.beta_fast);
      require(std::isfinite(rope.mscale) && rope.mscale >= 0.0,
              "rope_parameters.mscale: must be positive, or 0 for absent, got {}", rope.mscale);
      require(std::isfinite(rope.mscale_all_dim) && rope.mscale_all_dim >= 0.0,
              "rope_parameters.mscale_all_dim: must be positive, or 0 for absent, got {}",
              rope.mscale_all_dim);
      return;
    case RopeType::longrope:
      if (rope.factor != 0.0) require_scale(rope, "longrope");
      require(model.original_positions > 1 || rope.attention_factor > 0.0,
              "rope_parameters.original_max_position_embeddings: longrope needs more than 1, got {}",
              model.original_positions);
      require_factors(rope.short_factor, "short_factor", model.head_dim / 2);
      require_factors(rope.long_factor, "long_factor", model.head_dim / 2);
      return;
  }
  throw ContractError("rope_frequencies: unknown RopeType");
}

/// The factor itself, or where it is absent the ratio of context lengths (Phi-3, DeepSeek-V3).
double scale_of(const RopeSpec& rope, const Model& model) {
  if (rope.factor != 0.0) return rope.factor;
  return static_cast<double>(model.max_positions) / static_cast<double>(model.original_positions);
}

/// theta^(2i / head_dim), each step in T. Python's `base ** tensor` rounds the base to the tensor's type.
template <class T>
T position_frequency(T theta, std::int64_t pair, std::int64_t head_dim) {
  return std::pow(theta, static_cast<T>(2 * pair) / static_cast<T>(head_dim));
}

// Below, T = double gives the formula and T = float the roundings of transformers, whose tensors are fp32
// and whose scalars are doubles, rounded to fp32 where they meet a tensor. A scalar divided by a tensor is
// the rounded reciprocal times the scalar, as in torch.

/// "NTK-aware" base (u/bloc97, u/emozilla): grows with the row beyond max_position_embeddings. Beyond it
/// transformers computes with a tensor, hence in T; up to it the base stays as it is.
template <class T>
T dynamic_theta(const RopeSpec& rope, const Model& model) {
  if (model.sequence_length <= model.max_positions) return static_cast<T>(rope.theta);
  const double dim = static_cast<double>(model.head_dim);
  const T stretch = static_cast<T>(rope.factor) * static_cast<T>(model.sequence_length) /
                    static_cast<T>(model.max_positions);
  return static_cast<T>(rope.theta) *
         std::pow(stretch - static_cast<T>(rope.factor - 1.0), static_cast<T>(dim / (dim - 2.0)));
}

/// Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated.
template <class T>
T llama3_frequency(const RopeSpec& rope, const Model& model, T inverse) {
  const double original = static_cast<double>(model.original_positions);
  const T factor = static_cast<T>(rope.factor);
  const T wavelength = (T(1) / inverse) * static_cast<T>(2.0 * std::numbers::pi);
  if (wavelength > static_cast<T>(original / rope.low_freq_factor)) return inverse / factor;
  if (wavelength < static_cast<T>(original / rope.high_freq_factor)) return inverse;
  const T smooth = ((T(1) / wavelength) * static_cast<T>(original) - static_cast<T>(rope.low_freq_factor)) /
                   static_cast<T>(rope.high_freq_factor - rope.low_freq_factor);
  return (T(1) - smooth) * inverse / factor + smooth * inverse;
}

/// Peng et al., "YaRN" (2023): the pairs between which extrapolation turns into interpolation.
struct CorrectionRange {
  double low, high;
};

CorrectionRange correction_range(const RopeSpec& rope, const Model& model) {
  const double dim = static_cast<double>(model.head_dim);
  const auto pair_with_rotations = [&](double rotations) {
    return dim *
           std::log(static_cast<double>(model.original_positions) / (rotations * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(rope.theta));
  };
  double low = pair_with_rotations(rope.beta_fast);
  double high = pair_with_rotations(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  return {low, low == high ? high + 0.001 : high};
}

template <class T>
T yarn_frequency(double factor, CorrectionRange range, T frequency, std::int64_t pair) {
  const T ramp =
      std::clamp((static_cast<T>(pair) - static_cast<T>(range.low)) / static_cast<T>(range.high - range.low),
                 T(0), T(1));
  const T extrapolated = T(1) - ramp;
  return T(1) / (static_cast<T>(factor) * frequency) * (T(1) - extrapolated) +
         T(1) / frequency * extrapolated;
}

template <class T>
std::vector<T> inverse_frequencies(const RopeSpec& rope, const Model& model) {
  const T theta = rope.type == RopeType::dynamic ? dynamic_theta<T>(rope, model) : static_cast<T>(rope.theta);
  const bool is_long = model.sequence_length > model.original_positions;
  const std::span<const double> extension = is_long ? rope.long_factor : rope.short_factor;
  const CorrectionRange range =
      rope.type == RopeType::yarn ? correction_range(rope, model) : CorrectionRange{};

  std::vector<T> result;
  result.reserve(static_cast<std::size_t>(model.head_dim / 2));
  for (std::int64_t pair = 0; pair < model.head_dim / 2; ++pair) {
    const T frequency = position_frequency(theta, pair, model.head_dim);
    T inverse = T(1) / frequency;
    if (rope.type == RopeType::linear) inverse /= static_cast<T>(rope.factor);
    if (rope.type == RopeType::llama3) inverse = llama3_frequency(rope, model, inverse);
    if (rope.type == RopeType::yarn) inverse = yarn_frequency(scale_of(rope, model), range, frequency, pair);
    if (rope.type == RopeType::longrope)
      inverse = T(1) / (static_cast<T>(extension[static_cast<std::size_t>(pair)]) * frequency);
    result.push_back(inverse);
  }
  return result;
}

double attention_scaling(const RopeSpec& rope, const Model& model) {
  if (rope.type != RopeType::yarn && rope.type != RopeType::longrope) return 1.0;
  if (rope.attention_factor > 0.0) return rope.attention_factor;
  const double factor = scale_of(rope, model);
  if (factor <= 1.0) return 1.0;
  if (rope.type == RopeType::longrope)
    return std::sqrt(1.0 + std::log(factor) / std::log(static_cast<double>(model.original_positions)));
  const auto scaled = [&](double mscale) { return 0.1 * mscale * std::log(factor) + 1.0; };
  if (rope.mscale > 0.0 && rope.mscale_all_dim > 0.0)
    return scaled(rope.mscale) / scaled(rope.mscale_all_dim);
  return scaled(1.0);
}

/// One row per position: angle = position · inverse in T, cos and sin times the scaling, stored as Out.
template <class Out, class T>
void fill(TensorView cos, TensorView sin, std::span<const T> inverse, T scaling) {
  Out* cos_out = cos.as<Out>();
  Out* sin_out = sin.as<Out>();
  const std::int64_t positions = cos.dim(0);
  for (std::int64_t position = 0; position < positions; ++position) {
    for (const T frequency : inverse) {
      const T angle = static_cast<T>(position) * frequency;
      *cos_out++ = static_cast<Out>(std::cos(angle) * scaling);
      *sin_out++ = static_cast<Out>(std::sin(angle) * scaling);
    }
  }
}

template <class Out>
void fill(TensorView cos, TensorView sin, const RopeFrequencies& frequencies, RopePrecision precision) {
  if (precision == RopePrecision::exact)
    fill<Out, double>(cos, sin, frequencies.inverse_frequencies, frequencies.attention_scaling);
  else
    fill<Out, float>(cos, sin, frequencies.hf_inverse_frequencies,
                     static_cast<float>(frequencies.attention_scaling));
}

}  // namespace

std::int64_t rope_positions(const RopeSpec& rope, std::int64_t max_position_embeddings) {
  const std::int64_t original = rope.original_max_position_embeddings > 0
                                    ? rope.original_max_position_embeddings
                                    : max_position_embeddings;
  return std::max(max_position_embeddings,
                  static_cast<std::int64_t>(rope.factor * static_cast<double>(original)));
}

RopeFrequencies rope_frequencies(const RopeSpec& rope, std::int64_t head_dim,
                                 std::int64_t max_position_embeddings, std::int64_t sequence_length) {
  const Model model{.head_dim = head_dim,
                    .max_positions = max_position_embeddings,
                    .original_positions = rope.original_max_position_embeddings != 0
                                              ? rope.original_max_position_embeddings
                                              : max_position_embeddings,
                    .sequence_length = sequence_length};
  check(rope, model);
  return {.inverse_frequencies = inverse_frequencies<double>(rope, model),
          .attention_scaling = attention_scaling(rope, model),
          .hf_inverse_frequencies = inverse_frequencies<float>(rope, model)};
}

void fill_rope_tables(TensorView cos, TensorView sin, const RopeFrequencies& frequencies,
                      RopePrecision precision) {
  const std::int64_t pairs = std::ssize(frequencies.inverse_frequencies);
  LAYERSTREAM_EXPECT(cos.rank() == 2 && cos.dim(1) == pairs, "cos table of (P, {})", pairs);
  LAYERSTREAM_EXPECT(sin.shape() == cos.shape() && sin.dtype() == cos.dtype(),
                     "sin table like the cos table");
  LAYERSTREAM_EXPECT(
      precision == RopePrecision::exact || std::ssize(frequencies.hf_inverse_frequencies) == pairs,
      "{} fp32 frequencies, as rope_frequencies returns them", pairs);
  switch (cos.dtype()) {
    case DType::f64:
      return fill<double>(cos, sin, frequencies, precision);
    case DType::f32:
      return fill<float>(cos, sin, frequencies, precision);
    default:
      throw ContractError(fmt::format("rope tables are fp32 or fp64, not {}", name_of(cos.dtype())));
  }
}

}  // namespace layerstream
