#include "engine/step_runner.hpp"

#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/elementwise.hpp"
#include "ops/embedding.hpp"

namespace layerstream {
namespace {

/// ops::tokens_by_id of every chunk, counted from its first token.
std::vector<std::int32_t> tokens_by_id(const ChunkPlan& plan) {
  std::vector<std::int32_t> all;
  all.reserve(4 * plan.input_ids.size());
  for (const Chunk& chunk : plan.chunks) {
    const auto ids =
        std::span(plan.input_ids)
            .subspan(static_cast<std::size_t>(chunk.first_token), static_cast<std::size_t>(chunk.num_tokens));
    const std::vector<std::int32_t> rows = ops::tokens_by_id(ids);
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

}  // namespace

StepRunner::StepRunner(const Parts& parts, bool poison) : parts_(parts), poison_(poison) {}

void StepRunner::begin(const ChunkPlan& chunks, double max_grad_norm, const ops::AdamWSettings& optimizer) {
  const ChunkBounds& bounds = parts_.shape.bounds;
  LAYERSTREAM_EXPECT(chunks.num_tokens() <= bounds.tokens, "step of {} tokens, buffers for {}",
                     chunks.num_tokens(), bounds.tokens);
  for (const Chunk& chunk : chunks.chunks) {
    LAYERSTREAM_EXPECT(chunk.num_tokens <= bounds.chunk_tokens, "chunk of {} tokens, buffers for {}",
                       chunk.num_tokens, bounds.chunk_tokens);
  }
  LAYERSTREAM_EXPECT(chunks.max_position <= parts_.shape.max_positions, "{} positions, rope tables for {}",
                     chunks.max_position, parts_.shape.max_positions);
  chunks_ = &chunks;
  intermediate_rows_ = layerstream::intermediate_rows(parts_.shape.schedule, chunks);
  max_grad_norm_ = max_grad_norm;
  optimizer_settings_ = optimizer;
  bound_ = {};
  verdict_ = {};
  num_updated_ = 0;

  const StreamView stream = parts_.device.stream(Lane::compute);
  const DeviceBuffers& device = parts_.device_buffers;
  const HostBuffers& host = parts_.host_buffers;
  const auto upload = [&]<class T>(const TensorView& target, const TensorView& staged,
                                   const std::vector<T>& values) {
    if (values.empty()) return;
    std::ranges::copy(values, staged.as<T>());
    parts_.backend.copy_to_device(target.data(), staged.data(), values.size() * sizeof(T), stream);
  };
  upload(device.input_ids, host.input_ids, chunks.input_ids);
  upload(device.targets, host.targets, chunks.targets);
  upload(device.positions, host.positions, chunks.positions);
  if (device.tokens_by_id) upload(device.tokens_by_id, host.tokens_by_id, tokens_by_id(chunks));
  ops::fill_zero(context(stream), TensorView(device.nll_sum, {1}));
}

void StepRunner::run(const Operation& operation, StreamView stream) {
  switch (operation.kind) {
    case OperationKind::update:
      return update(operation);
    case OperationKind::load_state:
      return load_state(operation, stream);
    case OperationKind::update_on_device:
      return update_on_device(operation, stream);
    case OperationKind::store_state:
      return store_state(operation, stream);
    case OperationKind::fetch_weights:
      return fetch_weights(operation, stream);
    case OperationKind::release_weights:
      return release_weights(operation, stream);
    case OperationKind::forward:
      return forward(operation, stream);
    case OperationKind::save_input:
    case OperationKind::load_input:
      return move_input(operation, stream);
    case OperationKind::save_intermediates:
    case OperationKind::load_intermediates:
      return move_intermediates(operation, stream);
    case OperationKind::loss:
      return loss(operation, stream);
    case OperationKind::loss_and_gradient:
      return loss_and_gradient(operation, stream);
    case OperationKind::logits:
      return logits(operation, stream);
    case OperationKind::clear_gradient:
      return clear_gradient(operation, stream);
    case OperationKind::load_gradient:
      return load_gradient(operation, stream);
    case OperationKind::rebuild_key_value:
      return rebuild_key_value(operation, stream);
    case OperationKind::backward:
      return backward(operation, stream);
    case OperationKind::gradient_norm:
      return gradient_norm(operation, stream);
    case OperationKind::emit_gradient:
      return emit_gradient(operation, stream);
    case OperationKind::keep_gradient:
      return keep_gradient(operation, stream);
    case OperationKind::verdict:
      return compute_verdict();
  }
}

double StepRunner::read_nll_sum() {
  parts_.backend.copy_to_host(parts_.host_buffers.nll_sum, parts_.device_buffers.nll_sum, sizeof(double),
                              parts_.device.stream(Lane::compute));
  parts_.device.synchronize();
  return *parts_.host_buffers.nll_sum;
}

std::vector<float> StepRunner::read_logits() {
  const TensorView& logits = parts_.host_buffers.logits;
  parts_.backend.copy_to_host(logits.data(), parts_.device_buffers.logits.data(), logits.bytes(),
                              parts_.device.stream(Lane::compute));
  parts_.device.synchronize();
  return {logits.as<float>(), logits.as<float>() + logits.numel()};
}

// --- views ---

ops::Context StepRunner::context(StreamView stream) const {
  const TensorView& workspace = parts_.device_buffers.workspace;
  return {.stream = stream,
          .workspace = workspace.data(),
          .workspace_bytes = workspace.bytes(),
          .libraries = &parts_.libraries};
}

ops::Context StepRunner::context_without_workspace(StreamView stream) const {
  return {.stream = stream, .workspace = nullptr, .workspace_bytes = 0, .libraries = &parts_.libraries};
}

const Chunk& StepRunner::chunk_of(const Operation& operation) const {
  return chunks_->chunks[static_cast<std::size_t>(operation.chunk)];
}

const BlockLayout& StepRunner::layout_of(int block) const {
  return parts_.shape.layout.blocks[static_cast<std::size_t>(block)];
}

SavedIntermediates StepRunner::saved_of(const Operation& operation) const {
  const ScheduleSettings& schedule = parts_.shape.schedule;
  return schedule.train ? saved_by(schedule.policy(operation.block, *chunks_, operation.chunk))
                        : SavedIntermediates{};
}

TensorView StepRunner::input_rows(const TensorView& buffer, const Chunk& chunk) const {
  const bool holds_step = parts_.shape.schedule.loop_order == LoopOrder::layer_major;
  return buffer.rows(holds_step ? chunk.first_token : chunk.offset_in_group, chunk.num_tokens);
}

/// Empty where the chunk keeps none.
DecoderIntermediates StepRunner::intermediate_rows(const DecoderIntermediates& buffer, int chunk) const {
  const std::int64_t first = intermediate_rows_[static_cast<std::size_t>(chunk)];
  if (first < 0) return {};
  return rows_of(buffer, first, chunks_->chunks[static_cast<std::size_t>(chunk)].num_tokens);
}

TensorView StepRunner::input_of(int block, const Chunk& chunk) const {
  const std::vector<TensorView>& inputs = parts_.device_buffers.inputs;
  return input_rows(inputs[static_cast<std::size_t>(parts_.shape.schedule.input_buffer(block))], chunk);
}

DecoderIntermediates StepRunner::scratch_of(const Chunk& chunk) const {
  DecoderIntermediates whole = parts_.device_buffers.scratch_intermediates;
  const TensorView key_value_raw = std::exchange(whole.key_value_raw, {});
  DecoderIntermediates scratch = rows_of(whole, 0, chunk.num_tokens);
  if (key_value_raw) {
    const bool spans_group = parts_.device_buffers.key_value_raw_spans_group;
    scratch.key_value_raw = key_value_raw.rows(spans_group ? chunk.offset_in_group : 0, chunk.num_tokens);
  }
  return scratch;
}

DecoderIntermediates StepRunner::saved_views_of(const Operation& operation, const Chunk& chunk) const {
  const DeviceBuffers& device = parts_.device_buffers;
  if (operation.intermediate_slot >= 0) {
    return rows_of(device.in_transit[static_cast<std::size_t>(operation.intermediate_slot)], 0,
                   chunk.num_tokens);
  }
  if (!parts_.shape.schedule.activations_on_device(operation.block)) return {};
  return intermediate_rows(device.kept[static_cast<std::size_t>(operation.block)], operation.chunk);
}

DecoderIntermediates StepRunner::intermediates_of(const Operation& operation, const Chunk& chunk) const {
  DecoderIntermediates views = scratch_of(chunk);
  const DecoderIntermediates kept = saved_views_of(operation, chunk);
  const auto prefer_kept = [&](TensorView DecoderIntermediates::*member) {
    if (kept.*member) views.*member = kept.*member;
  };
  prefer_kept(&DecoderIntermediates::query_raw);
  prefer_kept(&DecoderIntermediates::key_value_raw);
  prefer_kept(&DecoderIntermediates::attention);
  prefer_kept(&DecoderIntermediates::lse);
  prefer_kept(&DecoderIntermediates::residual);
  prefer_kept(&DecoderIntermediates::gate_up);
  return views;
}

DecoderPass StepRunner::pass_of(const Operation& operation, const DecoderWeights& weights,
                                const DecoderIntermediates& intermediates) const {
  const Chunk& chunk = chunk_of(operation);
  const DeviceBuffers& device = parts_.device_buffers;
  const std::int64_t n = chunk.num_tokens;
  const std::size_t group = device.groups.size() == 1 ? 0 : static_cast<std::size_t>(operation.block - 1);
  const auto rows = [&](const TensorView& view) { return view ? view.rows(0, n) : view; };
  return {.spec = parts_.shape.spec,
          .layer = layout_of(operation.block).layer,
          .weights = weights,
          .chunk = chunk,
          .rope = {.cos = device.rope_cos, .sin = device.rope_sin},
          .positions = device.positions.rows(chunk.first_token, n),
          .x = input_of(operation.block, chunk),
          .intermediates = intermediates,
          .group = device.groups[group],
          .scratch = {.normed = rows(device.decoder.normed),
                      .query = rows(device.decoder.query),
                      .activation = rows(device.decoder.activation),
                      .dhidden = rows(device.decoder.dhidden),
                      .dattention = rows(device.decoder.dattention),
                      .dquery = rows(device.decoder.dquery),
                      .dquery_key_value = rows(device.decoder.dquery_key_value)},
          .deterministic = parts_.shape.deterministic};
}

DecoderWeights StepRunner::decoder_weights(int block) const {
  return bind_decoder_weights(parts_.shape.spec, layout_of(block), bound_.matrices, parts_.shape.compute,
                              parts_.device_buffers.vectors.data(), DType::f32);
}

HeadWeights StepRunner::head_weights() const {
  const ModelSpec& spec = parts_.shape.spec;
  return {
      .norm = ConstTensorView(parts_.device_buffers.vectors.data(), DType::f32, {spec.hidden_size}),
      .matrix = ConstTensorView(bound_.matrices, parts_.shape.compute, {spec.vocab_size, spec.hidden_size})};
}

HeadPass StepRunner::head_pass(const Operation& operation, const HeadWeights& weights) const {
  const Chunk& chunk = chunk_of(operation);
  return {.spec = parts_.shape.spec,
          .weights = weights,
          .x = input_of(operation.block, chunk),
          .targets = parts_.device_buffers.targets.rows(chunk.first_token, chunk.num_tokens),
          .scratch = parts_.device_buffers.head};
}

TensorView StepRunner::block_gradient(int block) const {
  return parts_.device_buffers.block_gradients[static_cast<std::size_t>(block)];
}

TensorView StepRunner::gradient_of(const Operation& operation, std::int64_t first,
                                   std::int64_t elements) const {
  const int slot = operation.gradient_slot;
  const TensorView buffer = slot < 0 ? block_gradient(operation.block)
                                     : parts_.device_buffers.gradient_slots[static_cast<std::size_t>(slot)];
  return buffer.rows(first, elements);
}

// --- weights ---

void StepRunner::fetch_weights(const Operation& operation, StreamView stream) {
  const int block = operation.block;
  parts_.backend.fetch(operation.weight_slot, block, weights_version(block), source_of(block), stream);
}

/// Resident weights come from the device itself.
BlockSource StepRunner::source_of(int block) const {
  BlockSource source = parts_.store.source(block, parts_.shape.low_halves_stream());
  const auto take_resident = [&](SlabSource& slab, int home) {
    if (!parts_.shape.schedule.device_update.is_resident(home)) return;
    const Slab& resident = parts_.device_buffers.resident[static_cast<std::size_t>(home)];
    slab.hi = resident.hi;
    slab.lo = resident.lo;
  };
  take_resident(source.slabs[0], block);
  if (source.slabs.size() > 1) take_resident(source.slabs[1], parts_.shape.layout.embedding());
  return source;
}

std::int64_t StepRunner::weights_version(int block) const {
  const ModelLayout& layout = parts_.shape.layout;
  const bool tied_head = block == layout.head() && layout.head_uses_embedding;
  return parts_.store.version(block) + (tied_head ? parts_.store.version(layout.embedding()) : 0);
}

void StepRunner::release_weights(const Operation& operation, StreamView stream) {
  parts_.backend.release(operation.weight_slot, operation.block);
  if (bound_.block == operation.block) bound_ = {};
  if (!poison_) return;
  void* const slot = parts_.device_buffers.weight_slots[static_cast<std::size_t>(operation.weight_slot)];
  parts_.device.poison(slot, parts_.shape.slot_bytes, stream);
}

/// Resident weights are used where they live; a head that lives on the device has the embedding there too.
WeightBinding StepRunner::binding_of(const Operation& operation) {
  const int block = operation.block;
  if (operation.weight_slot >= 0) {
    return parts_.backend.acquire(operation.weight_slot, block, weights_version(block));
  }
  WeightBinding binding;
  const BlockSource source = source_of(block);
  for (const SlabSource& slab : source.slabs) {
    binding.push_back({.matrix_hi = slab.hi,
                       .matrix_lo = source.low_halves ? slab.lo : nullptr,
                       .vector_hi = slab.hi + slab.num_matrix_elements,
                       .vector_lo = slab.lo + slab.num_matrix_elements});
  }
  return binding;
}

void StepRunner::bind(const Operation& operation, StreamView stream) {
  if (bound_.block == operation.block && bound_.slot == operation.weight_slot) return;
  const int block = operation.block;
  const ModelLayout& layout = parts_.shape.layout;
  const ModelSpec& spec = parts_.shape.spec;
  const WeightBinding binding = binding_of(operation);
  bound_ = {.block = block, .slot = operation.weight_slot, .matrices = nullptr, .table = {}};

  const BlockLayout& own = layout_of(block);
  const std::int64_t num_vectors = own.num_elements - own.num_matrix_elements;
  if (num_vectors > 0) {
    ops::merge_halves(context(stream), parts_.device_buffers.vectors.rows(0, num_vectors),
                      ConstTensorView(binding[0].vector_hi, {num_vectors}),
                      ConstTensorView(binding[0].vector_lo, {num_vectors}));
  }
  if (block == layout.embedding()) {
    bound_.table.hi = ConstTensorView(binding[0].matrix_hi, {spec.vocab_size, spec.hidden_size});
    if (binding[0].matrix_lo != nullptr) {
      bound_.table.lo = ConstTensorView(binding[0].matrix_lo, {spec.vocab_size, spec.hidden_size});
    }
    return;
  }
  const bool tied_head = block == layout.head() && layout.head_uses_embedding;
  const BoundSlab& slab = binding[tied_head ? 1 : 0];
  const std::int64_t num_matrix = layout_of(tied_head ? layout.embedding() : block).num_matrix_elements;
  if (parts_.shape.low_halves_stream()) {
    const TensorView merged = parts_.device_buffers.matrices.rows(0, num_matrix);
    ops::merge_halves(context(stream), merged, ConstTensorView(slab.matrix_hi, {num_matrix}),
                      ConstTensorView(slab.matrix_lo, {num_matrix}));
    bound_.matrices = merged.data();
  } else {
    bound_.matrices = slab.matrix_hi;
  }
}

// --- compute ---

void StepRunner::forward(const Operation& operation, StreamView stream) {
  bind(operation, stream);
  const Chunk& chunk = chunk_of(operation);
  const TensorView output = input_of(operation.block + 1, chunk);
  if (operation.block == parts_.shape.layout.embedding()) {
    ops::embedding_forward(context(stream), output, bound_.table,
                           parts_.device_buffers.input_ids.rows(chunk.first_token, chunk.num_tokens));
    return;
  }
  const DecoderWeights weights = decoder_weights(operation.block);
  decoder_forward(context(stream), pass_of(operation, weights, intermediates_of(operation, chunk)), output);
}

void StepRunner::loss(const Operation& operation, StreamView stream) {
  bind(operation, stream);
  const HeadWeights weights = head_weights();
  head_loss(context(stream), head_pass(operation, weights), parts_.device_buffers.nll_sum);
}

void StepRunner::loss_and_gradient(const Operation& operation, StreamView stream) {
  bind(operation, stream);
  const Chunk& chunk = chunk_of(operation);
  const HeadWeights weights = head_weights();
  const ModelSpec& spec = parts_.shape.spec;
  const ModelLayout& layout = parts_.shape.layout;
  const BlockLayout& own = layout_of(operation.block);
  // Own slab first: [lm_head] norm; then, when tied, the embedding's slab, unless that has its own buffer.
  const std::int64_t matrix_at = layout.head_uses_embedding ? own.num_elements : 0;
  const std::int64_t matrix_elements = spec.vocab_size * spec.hidden_size;
  const ScheduleSettings& schedule = parts_.shape.schedule;
  const bool is_frozen = schedule.is_frozen(operation.block);
  TensorView matrix;
  if (schedule.head_adds_to_embedding()) {
    matrix = block_gradient(layout.embedding()).rows(0, matrix_elements);
  } else if (layout.head_uses_embedding ? schedule.head_carries_embedding() : !is_frozen) {
    matrix = gradient_of(operation, matrix_at, matrix_elements);
  }
  const HeadGradients gradients{
      .norm = is_frozen ? parts_.device_buffers.unused_gradient.rows(0, spec.hidden_size)
                        : gradient_of(operation, own.num_matrix_elements, spec.hidden_size),
      .matrix = matrix ? matrix.reshape({spec.vocab_size, spec.hidden_size}) : TensorView()};
  const TensorView dx = parts_.device_buffers.residual_gradient.rows(chunk.first_token, chunk.num_tokens);
  HeadPass pass = head_pass(operation, weights);
  pass.overwrites_matrix_gradient = operation.starts_gradient;
  head_loss_and_gradient(context(stream), pass, 1.0 / static_cast<double>(chunks_->num_targets), dx,
                         gradients, parts_.device_buffers.nll_sum);
}

void StepRunner::logits(const Operation& operation, StreamView stream) {
  bind(operation, stream);
  const HeadWeights weights = head_weights();
  HeadPass pass = head_pass(operation, weights);
  pass.x = pass.x.rows(pass.x.dim(0) - 1, 1);
  head_logits(context(stream), pass, parts_.device_buffers.logits);
}

void StepRunner::rebuild_key_value(const Operation& operation, StreamView stream) {
  bind(operation, stream);
  const Chunk& chunk = chunk_of(operation);
  const DecoderWeights weights = decoder_weights(operation.block);
  // Saved projections are at hand only when they live on the device.
  SavedIntermediates ready = saved_of(operation);
  ready.projections = ready.projections && parts_.shape.schedule.activations_on_device(operation.block);
  const DecoderPass pass = pass_of(operation, weights, intermediates_of(operation, chunk));
  decoder_rebuild_key_value(context(stream), pass, ready);
}

DecoderGradients StepRunner::decoder_gradients(const Operation& operation) const {
  const ModelSpec& spec = parts_.shape.spec;
  const BlockLayout& block = layout_of(operation.block);
  if (parts_.shape.schedule.is_frozen(operation.block)) {
    return bind_vector_gradients(spec, block, parts_.device_buffers.unused_gradient.data(), DType::f32);
  }
  return bind_decoder_gradients(spec, block, gradient_of(operation, 0, block.num_elements).data(),
                                DType::f32);
}

void StepRunner::backward(const Operation& operation, StreamView stream) {
  const Chunk& chunk = chunk_of(operation);
  const TensorView dy_dx = parts_.device_buffers.residual_gradient.rows(chunk.first_token, chunk.num_tokens);
  if (operation.block == parts_.shape.layout.embedding()) {
    const TensorView gradient = gradient_of(operation, 0, layout_of(operation.block).num_elements);
    const ModelSpec& spec = parts_.shape.spec;
    ops::embedding_backward(
        context(stream),
        gradient.rows(0, spec.vocab_size * spec.hidden_size).reshape({spec.vocab_size, spec.hidden_size}),
        dy_dx, parts_.device_buffers.input_ids.rows(chunk.first_token, chunk.num_tokens),
        parts_.device_buffers.tokens_by_id.rows(chunk.first_token, chunk.num_tokens));
    return;
  }
  bind(operation, stream);
  const DecoderWeights weights = decoder_weights(operation.block);
  const DecoderGradients gradients = decoder_gradients(operation);
  DecoderPass pass = pass_of(operation, weights, intermediates_of(operation, chunk));
  const ChunkGroup& group = chunks_->groups[static_cast<std::size_t>(chunk.group)];
  // The group's last chunk comes first, and sees all of its keys.
  pass.overwrites_matrix_gradients = operation.starts_gradient;
  pass.overwrites_key_gradients = chunk.offset_in_group + chunk.num_tokens == group.num_tokens;
  decoder_backward(context(stream), pass, saved_of(operation), dy_dx, gradients);
}

// --- activations ---

void StepRunner::move_input(const Operation& operation, StreamView stream) {
  const Chunk& chunk = chunk_of(operation);
  const TensorView device = input_of(operation.block, chunk);
  const TensorView host =
      input_rows(parts_.host_buffers.inputs[static_cast<std::size_t>(operation.block)], chunk);
  if (operation.kind == OperationKind::save_input) {
    parts_.backend.copy_to_host(host.data(), device.data(), host.bytes(), stream);
  } else {
    parts_.backend.copy_to_device(device.data(), host.data(), host.bytes(), stream);
  }
}

void StepRunner::move_intermediates(const Operation& operation, StreamView stream) {
  const Chunk& chunk = chunk_of(operation);
  const DecoderIntermediates device = saved_views_of(operation, chunk);
  const DecoderIntermediates host = intermediate_rows(
      parts_.host_buffers.intermediates[static_cast<std::size_t>(operation.block)], operation.chunk);
  for_each_pair(device, host, [&](const TensorView& on_device, const TensorView& on_host) {
    if (operation.kind == OperationKind::save_intermediates) {
      parts_.backend.copy_to_host(on_host.data(), on_device.data(), on_device.bytes(), stream);
    } else {
      parts_.backend.copy_to_device(on_device.data(), on_host.data(), on_device.bytes(), stream);
    }
  });
}

}  // namespace layerstream
