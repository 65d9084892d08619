#include "engine/buffers.hpp"

#include <algorithm>

#include "ops/elementwise.hpp"

namespace layerstream {
namespace {

/// Which views of DecoderIntermediates to make.
struct Selection {
  bool attention = false;
  bool projections = false;
};

DecoderIntermediates make_intermediates(const EngineShape& shape, Selection selection, std::int64_t tokens,
                                        std::int64_t key_value_tokens, Arena& arena,
                                        std::string_view component) {
  const ModelSpec& spec = shape.spec;
  DecoderIntermediates set;
  if (selection.attention) {
    set.attention = arena.tensor(shape.compute, {tokens, spec.num_attention_heads, spec.head_dim}, component);
    set.lse = arena.tensor(shape.accumulator(), {tokens, spec.num_attention_heads}, component);
  }
  if (selection.projections) {
    set.query_raw = arena.tensor(shape.compute, {tokens, spec.query_size()}, component);
    set.key_value_raw = arena.tensor(shape.compute, {key_value_tokens, 2 * spec.key_value_size()}, component);
    set.residual = arena.tensor(shape.compute, {tokens, spec.hidden_size}, component);
    set.gate_up = arena.tensor(shape.compute, {tokens, 2 * spec.intermediate_size}, component);
  }
  return set;
}

/// Whether the embedding gets a gradient, which wants its tokens in order of their ids.
bool orders_tokens(const EngineShape& shape) {
  return shape.schedule.train && !shape.schedule.is_frozen(shape.layout.embedding());
}

Selection saved_selection(const EngineShape& shape, ActivationPolicy policy) {
  if (!shape.schedule.train) return {};
  const SavedIntermediates saved = saved_by(policy);
  return {saved.attention, saved.projections};
}

/// What some block's backward pass needs that is not saved, and what rebuilding keys and values writes.
Selection scratch_selection(const EngineShape& shape) {
  // Rebuilding keys and values from saved intermediates on the host goes through scratch.
  const bool some_on_host = shape.schedule.first_device_activations() > 1;
  const bool some_chunks_keep_none = shape.intermediate_tokens() < shape.activation_tokens();
  Selection scratch{.attention = some_chunks_keep_none, .projections = some_chunks_keep_none || some_on_host};
  for (int block = 1; block < shape.layout.head(); ++block) {
    const Selection saved = saved_selection(shape, shape.schedule.policy(block));
    scratch.attention = scratch.attention || !saved.attention;
    scratch.projections = scratch.projections || !saved.projections;
  }
  return scratch;
}

/// What some block keeps on the host.
Selection in_transit_selection(const EngineShape& shape) {
  const int last_on_host = shape.schedule.first_device_activations() - 1;
  if (last_on_host < 1) return {};
  return saved_selection(shape, shape.schedule.policy(last_on_host));
}

template <class Size>
std::int64_t max_over_blocks(const EngineShape& shape, const Size& size) {
  std::int64_t largest = 0;
  for (int block = 0; block < shape.layout.num_blocks(); ++block)
    largest = std::max<std::int64_t>(largest, size(shape, block));
  return largest;
}

const BlockLayout& block_of(const EngineShape& shape, int block) {
  return shape.layout.blocks[static_cast<std::size_t>(block)];
}

/// Matrices that a GEMM reads; the embedding's rows are gathered from the halves instead.
std::int64_t merged_matrix_elements(const EngineShape& shape, int block) {
  if (block == shape.layout.embedding()) return 0;
  const bool tied_head = block == shape.layout.head() && shape.layout.head_uses_embedding;
  return tied_head ? block_of(shape, shape.layout.embedding()).num_matrix_elements
                   : block_of(shape, block).num_matrix_elements;
}

std::int64_t vector_elements(const EngineShape& shape, int block) {
  const BlockLayout& layout = block_of(shape, block);
  return layout.num_elements - layout.num_matrix_elements;
}

/// Vectors of a frozen block that the backward pass goes through: kernels write their gradients with others.
std::int64_t passed_vector_elements(const EngineShape& shape, int block) {
  const ScheduleSettings& schedule = shape.schedule;
  return schedule.train && schedule.is_frozen(block) && block >= schedule.first_backward()
             ? vector_elements(shape, block)
             : 0;
}

std::int64_t gradient_elements(const EngineShape& shape, int block) {
  return shape.gradient_elements(block);
}

/// Elements that a block's gradient takes of a ring buffer.
std::int64_t ring_elements(const EngineShape& shape, int block) {
  return shape.schedule.has_own_gradient_buffer(block) ? 0 : shape.gradient_elements(block);
}

}  // namespace

std::int64_t EngineShape::gradient_elements(int block) const {
  if (schedule.is_frozen(block)) return 0;
  const std::int64_t own = layout.blocks[static_cast<std::size_t>(block)].num_elements;
  const bool carries_embedding = block == layout.head() && schedule.head_carries_embedding();
  return own +
         (carries_embedding ? layout.blocks[static_cast<std::size_t>(layout.embedding())].num_elements : 0);
}

std::int64_t EngineShape::intermediate_tokens() const {
  const std::int64_t of_chunks = schedule.activation_chunks * bounds.chunk_tokens;
  if (schedule.loop_order == LoopOrder::micro_batch_major) return std::min(bounds.group_tokens, of_chunks);
  // Rows that share a chunk have no more tokens in it than rows alone would keep.
  return bounds.tokens / bounds.row_tokens * std::min(bounds.row_tokens, of_chunks);
}

SavedIntermediates saved_by(ActivationPolicy policy) {
  return {.attention = policy != ActivationPolicy::input, .projections = policy == ActivationPolicy::all};
}

DeviceBuffers::DeviceBuffers(const EngineShape& shape, Arena& arena) {
  const ModelSpec& spec = shape.spec;
  const ScheduleSettings& schedule = shape.schedule;
  const DType compute = shape.compute;
  const DType accumulator = shape.accumulator();
  const auto [tokens, chunk, group, row] = shape.bounds;
  const std::int64_t hidden = spec.hidden_size;

  rope_cos = arena.tensor(accumulator, {shape.max_positions, spec.head_dim / 2}, "rope tables");
  rope_sin = arena.tensor(accumulator, {shape.max_positions, spec.head_dim / 2}, "rope tables");
  const DeviceUpdate& update = schedule.device_update;
  block_gradients.resize(static_cast<std::size_t>(shape.layout.num_blocks()));
  for (int block = 0; block < update.resident_blocks; ++block) {
    resident.push_back(make_slab(block_of(shape, block), arena, "resident weights and moments",
                                 "resident weights and moments", "resident weights and moments"));
  }
  for (int block = 0; schedule.train && block < shape.layout.num_blocks(); ++block) {
    const std::int64_t elements =
        schedule.has_own_gradient_buffer(block) ? shape.gradient_elements(block) : update.kept(block);
    if (elements == 0) continue;
    block_gradients[static_cast<std::size_t>(block)] =
        arena.tensor(DType::f32, {elements}, "gradients that stay on the device (fp32)");
  }
  if (schedule.emits_embedding_rows()) {
    embedding_rows_written = arena.tensor(DType::u8, {spec.vocab_size}, "used rows of the embedding");
  }
  first_volatile_byte = arena.used();

  for (int slot = 0; slot < (update.elements.empty() ? 0 : update.slots); ++slot) {
    constexpr std::string_view component = "optimizer state in transit";
    const Shape piece{update.piece_elements};
    update_slots.push_back({.hi = arena.tensor(DType::bf16, piece, component),
                            .lo = arena.tensor(DType::i16, piece, component),
                            .exp_avg = arena.tensor(DType::f32, piece, component),
                            .exp_avg_sq = arena.tensor(DType::f32, piece, component),
                            .gradient = {}});
    if (!update.gradients_on_device) {
      update_slots.back().gradient = arena.tensor(DType::f32, piece, component);
    }
  }
  for (int slot = 0; slot < schedule.weight_slots; ++slot) {
    weight_slots.push_back(arena.allocate(shape.slot_bytes, "weight slots"));
  }
  if (shape.low_halves_stream()) {
    matrices =
        arena.tensor(DType::f32, {max_over_blocks(shape, merged_matrix_elements)}, "merged fp32 weights");
  }
  vectors = arena.tensor(DType::f32, {max_over_blocks(shape, vector_elements)}, "merged fp32 weights");
  if (const std::int64_t elements = max_over_blocks(shape, ring_elements); schedule.train && elements > 0) {
    for (int slot = 0; slot < schedule.gradient_slots; ++slot) {
      gradient_slots.push_back(arena.tensor(DType::f32, {elements}, "gradient slots (fp32)"));
    }
  }

  if (const std::int64_t elements = max_over_blocks(shape, passed_vector_elements); elements > 0) {
    unused_gradient = arena.tensor(DType::f32, {elements}, "gradients of frozen blocks' norms and biases");
  }

  const int num_blocks = shape.layout.num_blocks();
  const std::int64_t activation_tokens = shape.activation_tokens();
  inputs.resize(static_cast<std::size_t>(schedule.num_input_buffers()));
  for (int block = 1; block < num_blocks; ++block) {
    TensorView& buffer = inputs[static_cast<std::size_t>(schedule.input_buffer(block))];
    if (buffer) continue;
    buffer = arena.tensor(compute, {activation_tokens, hidden},
                          schedule.activations_on_device(block) ? "saved block inputs" : "residual stream");
  }
  if (schedule.train) residual_gradient = arena.tensor(compute, {tokens, hidden}, "residual stream gradient");

  kept.resize(static_cast<std::size_t>(schedule.head()));
  for (int block = schedule.first_device_activations(); block < schedule.head(); ++block) {
    const std::int64_t rows = shape.intermediate_tokens();
    kept[static_cast<std::size_t>(block)] = make_intermediates(
        shape, saved_selection(shape, schedule.policy(block)), rows, rows, arena, "saved intermediates");
  }
  if (const Selection selection = in_transit_selection(shape); selection.attention) {
    in_transit.resize(static_cast<std::size_t>(schedule.intermediate_slots));
    for (DecoderIntermediates& slot : in_transit) {
      slot = make_intermediates(shape, selection, chunk, chunk, arena, "intermediates in transit");
    }
  }
  // With a norm on the keys, the backward pass of a chunk reads what the rebuild of the whole group wrote.
  key_value_raw_spans_group = spec.qk_norm;
  scratch_intermediates =
      make_intermediates(shape, scratch_selection(shape), chunk, key_value_raw_spans_group ? group : chunk,
                         arena, "chunk scratch");

  const Shape head_shape{group, spec.num_key_value_heads, spec.head_dim};
  groups.resize(shape.keeps_key_values ? static_cast<std::size_t>(spec.num_hidden_layers) : 1);
  for (GroupKeyValue& key_value : groups) {
    key_value.key = arena.tensor(compute, head_shape, "keys and values");
    key_value.value = arena.tensor(compute, head_shape, "keys and values");
    if (schedule.train) {
      key_value.dkey = arena.tensor(accumulator, head_shape, "key and value gradients");
      key_value.dvalue = arena.tensor(accumulator, head_shape, "key and value gradients");
    }
  }

  constexpr std::string_view scratch = "chunk scratch";
  const Shape query_shape{chunk, spec.num_attention_heads, spec.head_dim};
  decoder.normed = arena.tensor(compute, {chunk, hidden}, scratch);
  decoder.query = arena.tensor(compute, query_shape, scratch);
  decoder.activation = arena.tensor(compute, {chunk, spec.intermediate_size}, scratch);
  if (schedule.train) {
    decoder.dhidden = arena.tensor(compute, {chunk, hidden}, scratch);
    decoder.dattention = arena.tensor(compute, query_shape, scratch);
    decoder.dquery = arena.tensor(compute, query_shape, scratch);
    decoder.dquery_key_value =
        arena.tensor(compute, {chunk, spec.query_size() + 2 * spec.key_value_size()}, scratch);
  }

  const std::int64_t tile = std::min(shape.loss_tile_tokens, chunk);
  head.normed = arena.tensor(compute, {tile, hidden}, "loss tile");
  head.logits = arena.tensor(accumulator, {tile, spec.vocab_size}, "loss tile");
  head.nll = arena.tensor(DType::f64, {tile}, "loss tile");
  if (schedule.train) {
    head.dnormed = arena.tensor(compute, {tile, hidden}, "loss tile");
    head.dlogits = arena.tensor(compute, {tile, spec.vocab_size}, "loss tile");
  }
  if (schedule.logits_only) logits = arena.tensor(accumulator, {1, spec.vocab_size}, "logits");

  input_ids = arena.tensor(DType::i32, {tokens}, "token ids, targets, positions");
  targets = arena.tensor(DType::i32, {tokens}, "token ids, targets, positions");
  positions = arena.tensor(DType::i32, {tokens}, "token ids, targets, positions");
  if (orders_tokens(shape)) {
    tokens_by_id = arena.tensor(DType::i32, {tokens, 4}, "token ids, targets, positions");
  }

  std::size_t workspace_bytes =
      std::max(decoder_workspace(spec, chunk, group, compute, shape.deterministic, row, shape.on_gpu),
               head_workspace(spec, tile, compute));
  if (schedule.train) {
    workspace_bytes =
        std::max(workspace_bytes,
                 ops::sum_of_squares_workspace(max_over_blocks(shape, layerstream::gradient_elements)));
  }
  workspace = arena.tensor(DType::u8, {static_cast<std::int64_t>(workspace_bytes)}, "kernel workspace");
  nll_sum = static_cast<double*>(arena.allocate(sizeof(double), "loss and norm sums"));
  norm_partials = static_cast<double*>(
      arena.allocate(sizeof(double) * static_cast<std::size_t>(num_blocks), "loss and norm sums"));
}

HostBuffers::HostBuffers(const EngineShape& shape, Arena& arena) {
  const ScheduleSettings& schedule = shape.schedule;
  const int num_blocks = shape.layout.num_blocks();
  nll_sum = static_cast<double*>(arena.allocate(sizeof(double), "loss and norm sums"));
  input_ids = arena.tensor(DType::i32, {shape.bounds.tokens}, "token ids, targets, positions");
  targets = arena.tensor(DType::i32, {shape.bounds.tokens}, "token ids, targets, positions");
  positions = arena.tensor(DType::i32, {shape.bounds.tokens}, "token ids, targets, positions");
  if (orders_tokens(shape)) {
    tokens_by_id = arena.tensor(DType::i32, {shape.bounds.tokens, 4}, "token ids, targets, positions");
  }
  if (schedule.logits_only) logits = arena.tensor(shape.accumulator(), {1, shape.spec.vocab_size}, "logits");
  if (!schedule.train) return;
  norm_partials = static_cast<double*>(
      arena.allocate(sizeof(double) * static_cast<std::size_t>(num_blocks), "loss and norm sums"));

  std::vector<std::int64_t> slab_elements(static_cast<std::size_t>(num_host_gradient_slabs(schedule)), 0);
  for (int block = 0; block < num_blocks; ++block) {
    std::int64_t& elements = slab_elements[static_cast<std::size_t>(host_gradient_slab(schedule, block))];
    if (schedule.is_frozen(block)) continue;
    elements = std::max(elements, block_of(shape, block).num_elements - schedule.device_update.kept(block));
  }
  for (const std::int64_t elements : slab_elements) {
    gradients.push_back(arena.tensor(DType::f32, {elements}, "gradients (fp32)"));
  }

  inputs.resize(static_cast<std::size_t>(num_blocks));
  intermediates.resize(static_cast<std::size_t>(num_blocks));
  for (int block = 1; block < schedule.first_device_activations(); ++block) {
    if (schedule.input_leaves(block)) {
      inputs[static_cast<std::size_t>(block)] = arena.tensor(
          shape.compute, {shape.activation_tokens(), shape.spec.hidden_size}, "saved block inputs");
    }
    const std::int64_t rows = shape.intermediate_tokens();
    intermediates[static_cast<std::size_t>(block)] = make_intermediates(
        shape, saved_selection(shape, schedule.policy(block)), rows, rows, arena, "saved intermediates");
  }
}

DecoderIntermediates rows_of(const DecoderIntermediates& set, std::int64_t first, std::int64_t count) {
  const auto rows = [&](const TensorView& view) { return view ? view.rows(first, count) : view; };
  return {.query_raw = rows(set.query_raw),
          .key_value_raw = rows(set.key_value_raw),
          .attention = rows(set.attention),
          .lse = rows(set.lse),
          .residual = rows(set.residual),
          .gate_up = rows(set.gate_up)};
}

std::int64_t intermediate_bytes_per_token(const EngineShape& shape, ActivationPolicy policy) {
  const ModelSpec& spec = shape.spec;
  const Selection saved = saved_selection(shape, policy);
  const auto compute_bytes = static_cast<std::int64_t>(size_of(shape.compute));
  std::int64_t bytes = 0;
  if (saved.attention) {
    bytes += spec.query_size() * compute_bytes +
             spec.num_attention_heads * static_cast<std::int64_t>(size_of(shape.accumulator()));
  }
  if (saved.projections) {
    bytes += (spec.query_size() + 2 * spec.key_value_size() + spec.hidden_size + 2 * spec.intermediate_size) *
             compute_bytes;
  }
  return bytes;
}

std::vector<BlockCost> block_costs(const EngineShape& shape, const ParameterStore& store,
                                   const MemoryBackend& backend) {
  std::vector<BlockCost> costs;
  const ModelSpec& spec = shape.spec;
  for (int block = 0; block < shape.layout.num_blocks(); ++block) {
    const bool decoder = block_of(shape, block).kind == BlockKind::decoder;
    const std::int64_t elements = block_of(shape, block).num_elements;
    BlockCost cost;
    cost.num_elements = elements;
    cost.fetch_bytes =
        static_cast<std::int64_t>(backend.slot_bytes(store.source(block, shape.low_halves_stream())));
    cost.gradient_bytes = 4 * shape.gradient_elements(block);
    cost.gradient_row_bytes = 4 * spec.hidden_size;
    cost.update_bytes = 28 * elements;
    cost.forward_flops_per_token = 2.0 * static_cast<double>(merged_matrix_elements(shape, block));
    if (decoder) {
      cost.input_bytes_per_token = spec.hidden_size * static_cast<std::int64_t>(size_of(shape.compute));
      cost.intermediate_bytes_per_token = intermediate_bytes_per_token(shape, shape.schedule.policy(block));
      cost.attention_flops_per_pair = 4.0 * static_cast<double>(spec.query_size());
      cost.attention_pattern = spec.pattern_of(block - 1);
      // The down projection's output is the next block's input, which nobody needs again.
      cost.recomputed_flops_per_token =
          cost.forward_flops_per_token - 2.0 * static_cast<double>(spec.hidden_size * spec.intermediate_size);
    }
    costs.push_back(cost);
  }
  return costs;
}

}  // namespace layerstream
