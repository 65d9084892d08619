#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.hpp"
#include "model/spec.hpp"

namespace layerstream {

/// One learnable tensor, under its Hugging Face name, and its place in its block's slab.
struct Parameter {
  std::string name;         ///< "model.layers.3.self_attn.q_proj.weight"
  Shape shape;              ///< as in the file: (out, in) for matrices
  std::int64_t offset = 0;  ///< elements from the slab's start
  bool is_frozen = false;   ///< is not trained
  bool is_matrix = false;   ///< meets the tensor cores in bf16 and is decayed; vectors stay FP32, undecayed
  std::int64_t numel() const { return shape.numel(); }
};

enum class BlockKind : std::uint8_t { embedding, decoder, head };

/// The parameters of one unit of streaming and their order in its slab: matrices first, then vectors.
/// Matrices that one GEMM can use together lie side by side (q, k, v; gate, up).
struct BlockLayout {
  BlockKind kind = BlockKind::decoder;
  std::int64_t layer = -1;  ///< decoder layer index; -1 for embedding and head
  std::vector<Parameter> parameters;
  std::int64_t num_matrix_elements = 0;  ///< the slab's first part, multiple of slab_alignment
  std::int64_t num_elements = 0;         ///< matrices and vectors, multiple of slab_alignment

  /// Whether nothing of it is trained.
  bool is_frozen() const;
  /// Index into `parameters` by the name's tail ("q_proj.weight"); -1 when the block has none such.
  int find(std::string_view tail) const;
  /// The same, but absence is a ContractError.
  const Parameter& at(std::string_view tail) const;
};

/// Slab parts start and end on multiples of this many elements, so that 16-byte accesses never straddle.
inline constexpr std::int64_t slab_alignment = 64;

/// The whole model as blocks: embedding, decoder layers in order, head (final norm + LM head).
///
/// With tied embeddings the head has no matrix of its own: it reads the embedding's slab, and
/// `head_uses_embedding` is true.
struct ModelLayout {
  std::vector<BlockLayout> blocks;
  bool head_uses_embedding = false;

  int num_blocks() const { return static_cast<int>(blocks.size()); }
  int embedding() const { return 0; }
  int head() const { return num_blocks() - 1; }
  /// Number of learnable scalars, padding not counted, a tied matrix counted once.
  std::int64_t num_parameters() const;
  std::int64_t num_trainable_parameters() const;
  /// Whether a block has no gradient: all of it is frozen, and through a tied head no other's grows.
  bool is_frozen(int block) const;
};

/// @param frozen patterns (see fits_pattern) of parameters that are not trained. Throws ConfigError for one
/// that no name fits, and if nothing is left to train.
ModelLayout make_layout(const ModelSpec& spec, const std::vector<std::string>& frozen = {});

/// Throws ConfigError for a pattern of names that no parameter's name fits. @param key of the configuration
/// that gives it
void check_pattern(const ModelLayout& layout, const std::string& pattern, std::string_view key);

}  // namespace layerstream
