#pragma once

#include <cstdint>
#include <vector>

#include "core/rope_precision.hpp"
#include "core/tensor.hpp"

namespace layerstream {

enum class RopeType : std::uint8_t { standard, linear, dynamic, llama3, yarn, longrope };

/// Rotary position embedding, after Hugging Face's `rope_scaling` / `rope_parameters`. Fields that the
/// type does not use keep their defaults.
struct RopeSpec {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  double factor = 0.0;                                ///< 0: absent; yarn, longrope: max / original positions
  std::int64_t original_max_position_embeddings = 0;  ///< 0: max_position_embeddings
  double low_freq_factor = 1.0;                       ///< llama3
  double high_freq_factor = 4.0;                      ///< llama3
  double beta_fast = 32.0;                            ///< yarn
  double beta_slow = 1.0;                             ///< yarn
  double attention_factor = 0.0;                      ///< yarn, longrope; 0: derived from factor
  double mscale = 0.0;                                ///< yarn; 0: absent
  double mscale_all_dim = 0.0;                        ///< yarn; 0: absent
  bool truncate = true;                               ///< yarn: round the correction range to integers
  std::vector<double> short_factor = {};              ///< longrope, head_dim / 2 numbers
  std::vector<double> long_factor = {};               ///< longrope

  friend bool operator==(const RopeSpec&, const RopeSpec&) = default;
};

/// The angles of one model at one sequence length: position p turns pair i by p · inverse_frequencies[i].
struct RopeFrequencies {
  std::vector<double> inverse_frequencies;    ///< head_dim / 2
  double attention_scaling = 1.0;             ///< multiplies cos and sin (yarn, longrope)
  std::vector<float> hf_inverse_frequencies;  ///< the same as transformers rounds them: fp32 at each step

  friend bool operator==(const RopeFrequencies&, const RopeFrequencies&) = default;
};

/// Frequencies in FP64, following transformers' modeling_rope_utils (5.24). `sequence_length` is the length
/// of the whole row (never of a chunk): dynamic and longrope depend on it.
/// @throws ConfigError naming the rope_parameters key for a value that makes no sense.
RopeFrequencies rope_frequencies(const RopeSpec& rope, std::int64_t head_dim,
                                 std::int64_t max_position_embeddings, std::int64_t sequence_length);

/// Positions that the embedding was made for: what the model has, or what its scaling reaches.
std::int64_t rope_positions(const RopeSpec& rope, std::int64_t max_position_embeddings);

/// Fills cos and sin, each (P, head_dim / 2) fp32 or fp64 in host memory, for positions 0 .. P − 1, both
/// times the attention scaling. `hf` rounds to fp32 at every step, whatever the type of the tables.
void fill_rope_tables(TensorView cos, TensorView sin, const RopeFrequencies& frequencies,
                      RopePrecision precision);

}  // namespace layerstream
