#include "model/layout.hpp"

#include <algorithm>
#include <string_view>

#include "core/error.hpp"
#include "core/name_pattern.hpp"

namespace layerstream {
namespace {

/// Appends parameters to a block, matrices before vectors.
class SlabBuilder {
 public:
  explicit SlabBuilder(BlockLayout& block, std::string prefix) : block_(block), prefix_(std::move(prefix)) {}

  void matrix(std::string_view tail, std::int64_t rows, std::int64_t columns) {
    add(tail, {rows, columns}, true);
  }
  void vector(std::string_view tail, std::int64_t size) { add(tail, {size}, false); }

  void end_matrices() { block_.num_matrix_elements = align(); }
  void end_vectors() { block_.num_elements = align(); }

 private:
  void add(std::string_view tail, Shape shape, bool is_matrix) {
    block_.parameters.push_back(
        {.name = prefix_ + std::string(tail), .shape = shape, .offset = next_, .is_matrix = is_matrix});
    next_ += shape.numel();
  }
  std::int64_t align() {
    next_ = (next_ + slab_alignment - 1) / slab_alignment * slab_alignment;
    return next_;
  }

  BlockLayout& block_;
  std::string prefix_;
  std::int64_t next_ = 0;
};

BlockLayout decoder_layout(const ModelSpec& spec, std::int64_t layer) {
  BlockLayout block{.kind = BlockKind::decoder, .layer = layer, .parameters = {}};
  SlabBuilder slab(block, fmt::format("model.layers.{}.", layer));
  const std::int64_t hidden = spec.hidden_size;
  const std::int64_t query = spec.query_size();
  const std::int64_t key_value = spec.key_value_size();
  const std::int64_t intermediate = spec.intermediate_size;

  slab.matrix("self_attn.q_proj.weight", query, hidden);
  slab.matrix("self_attn.k_proj.weight", key_value, hidden);
  slab.matrix("self_attn.v_proj.weight", key_value, hidden);
  slab.matrix("self_attn.o_proj.weight", hidden, query);
  slab.matrix("mlp.gate_proj.weight", intermediate, hidden);
  slab.matrix("mlp.up_proj.weight", intermediate, hidden);
  slab.matrix("mlp.down_proj.weight", hidden, intermediate);
  slab.end_matrices();

  slab.vector("input_layernorm.weight", hidden);
  slab.vector("post_attention_layernorm.weight", hidden);
  if (spec.qkv_bias) {
    slab.vector("self_attn.q_proj.bias", query);
    slab.vector("self_attn.k_proj.bias", key_value);
    slab.vector("self_attn.v_proj.bias", key_value);
  }
  if (spec.output_bias) slab.vector("self_attn.o_proj.bias", hidden);
  if (spec.mlp_bias) {
    slab.vector("mlp.gate_proj.bias", intermediate);
    slab.vector("mlp.up_proj.bias", intermediate);
    slab.vector("mlp.down_proj.bias", hidden);
  }
  if (spec.qk_norm) {
    slab.vector("self_attn.q_norm.weight", spec.head_dim);
    slab.vector("self_attn.k_norm.weight", spec.head_dim);
  }
  slab.end_vectors();
  return block;
}

void freeze(ModelLayout& layout, const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    check_pattern(layout, pattern, "frozen_parameters");
    for (BlockLayout& block : layout.blocks) {
      for (Parameter& parameter : block.parameters) {
        parameter.is_frozen = parameter.is_frozen || fits_pattern(parameter.name, pattern);
      }
    }
  }
  if (layout.num_trainable_parameters() == 0) {
    throw ConfigError("frozen_parameters: the patterns fit all parameters, so that nothing is left to train");
  }
}

}  // namespace

bool BlockLayout::is_frozen() const {
  return std::ranges::all_of(parameters, &Parameter::is_frozen);
}

int BlockLayout::find(std::string_view tail) const {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (std::string_view(parameters[i].name).ends_with(tail)) return static_cast<int>(i);
  }
  return -1;
}

const Parameter& BlockLayout::at(std::string_view tail) const {
  const int index = find(tail);
  LAYERSTREAM_EXPECT(index >= 0, "block has no parameter '{}'", tail);
  return parameters[static_cast<std::size_t>(index)];
}

std::int64_t ModelLayout::num_parameters() const {
  std::int64_t sum = 0;
  for (const BlockLayout& block : blocks) {
    for (const Parameter& parameter : block.parameters) sum += parameter.numel();
  }
  return sum;
}

std::int64_t ModelLayout::num_trainable_parameters() const {
  std::int64_t sum = 0;
  for (const BlockLayout& block : blocks) {
    for (const Parameter& parameter : block.parameters) sum += parameter.is_frozen ? 0 : parameter.numel();
  }
  return sum;
}

bool ModelLayout::is_frozen(int block) const {
  const bool has_embeddings_gradient =
      block == head() && head_uses_embedding && !blocks[static_cast<std::size_t>(embedding())].is_frozen();
  return blocks[static_cast<std::size_t>(block)].is_frozen() && !has_embeddings_gradient;
}

ModelLayout make_layout(const ModelSpec& spec, const std::vector<std::string>& frozen) {
  ModelLayout layout;
  layout.head_uses_embedding = spec.tie_word_embeddings;

  BlockLayout embedding{.kind = BlockKind::embedding, .parameters = {}};
  SlabBuilder embedding_slab(embedding, "model.");
  embedding_slab.matrix("embed_tokens.weight", spec.vocab_size, spec.hidden_size);
  embedding_slab.end_matrices();
  embedding_slab.end_vectors();
  layout.blocks.push_back(std::move(embedding));

  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    layout.blocks.push_back(decoder_layout(spec, layer));
  }

  BlockLayout head{.kind = BlockKind::head, .parameters = {}};
  SlabBuilder head_slab(head, "");
  if (!spec.tie_word_embeddings) head_slab.matrix("lm_head.weight", spec.vocab_size, spec.hidden_size);
  head_slab.end_matrices();
  head_slab.vector("model.norm.weight", spec.hidden_size);
  head_slab.end_vectors();
  layout.blocks.push_back(std::move(head));
  freeze(layout, frozen);
  return layout;
}

void check_pattern(const ModelLayout& layout, const std::string& pattern, std::string_view key) {
  const auto fits = [&](const Parameter& parameter) { return fits_pattern(parameter.name, pattern); };
  for (const BlockLayout& block : layout.blocks) {
    if (std::ranges::any_of(block.parameters, fits)) return;
  }
  throw ConfigError(fmt::format("{}: no parameter's name fits \"{}\"; names are {}, {} and so on", key,
                                pattern, layout.blocks[0].parameters[0].name,
                                layout.blocks[1].parameters[0].name));
}

}  // namespace layerstream
