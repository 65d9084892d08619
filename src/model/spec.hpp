#pragma once

#include <cstdint>
#include <string>

#include "longctx/attention_pattern.hpp"
#include "longctx/rope.hpp"

namespace layerstream {

/// The decoder families we know; each is the dense, pre-norm, SwiGLU transformer with its own details.
enum class Family : std::uint8_t { llama, mistral, qwen2, qwen3 };

/// A dense decoder as Hugging Face's config.json describes it. All sizes are in elements.
struct ModelSpec {
  Family family = Family::llama;
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;            ///< q, k, v projections have a bias
  bool output_bias = false;         ///< o projection has a bias
  bool mlp_bias = false;            ///< gate, up and down projections have a bias
  bool qk_norm = false;             ///< RMS norm over head_dim of each query and key head (Qwen3)
  std::int64_t sliding_window = 0;  ///< keys a query sees, itself included; 0: all
  /// Layers below this index attend to everything even when sliding_window is set (Qwen2/3
  /// `max_window_layers`, or the leading "full_attention" run of `layer_types`).
  std::int64_t first_window_layer = 0;
  RopeSpec rope;
  std::string dtype = "float32";  ///< the file's own `torch_dtype` / `dtype`
  /// The run's choice, not the model's: of layers without a window of their own.
  AttentionPattern attention_pattern = {};

  friend bool operator==(const ModelSpec&, const ModelSpec&) = default;

  std::int64_t query_size() const { return num_attention_heads * head_dim; }
  std::int64_t key_value_size() const { return num_key_value_heads * head_dim; }
  /// Keys that a query of `layer` sees; 0: all before it.
  std::int64_t window_of(std::int64_t layer) const {
    return layer >= first_window_layer ? sliding_window : 0;
  }
  AttentionPattern pattern_of(std::int64_t layer) const {
    const std::int64_t window = window_of(layer);
    if (window == 0) return attention_pattern;
    return {.type = AttentionPatternType::window, .window = window};
  }
};

}  // namespace layerstream
