#include "model/decoder.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "ops/attention.hpp"
#include "ops/elementwise.hpp"
#include "ops/heads.hpp"
#include "ops/linear.hpp"
#include "ops/norm.hpp"

namespace layerstream {
namespace {

template <class View, class Pointer>
DecoderTensors<View> bind(const ModelSpec& spec, const BlockLayout& block, Pointer matrices,
                          DType matrix_dtype, Pointer vectors, DType vector_dtype) {
  using BytePointer =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte*, std::byte*>;
  const auto matrix = [&](const char* tail, std::int64_t rows, std::int64_t columns) {
    const Parameter& parameter = block.at(tail);
    return View(static_cast<BytePointer>(matrices) +
                    static_cast<std::size_t>(parameter.offset) * size_of(matrix_dtype),
                matrix_dtype, {rows, columns});
  };
  const auto vector = [&](const char* tail, std::int64_t size) -> View {
    const int index = block.find(tail);
    if (index < 0) return {};
    const std::int64_t offset =
        block.parameters[static_cast<std::size_t>(index)].offset - block.num_matrix_elements;
    return View(static_cast<BytePointer>(vectors) + static_cast<std::size_t>(offset) * size_of(vector_dtype),
                vector_dtype, {size});
  };
  const std::int64_t query = spec.query_size();
  const std::int64_t key_value = spec.key_value_size();
  DecoderTensors<View> tensors;
  tensors.query_key_value = matrix("q_proj.weight", query + 2 * key_value, spec.hidden_size);
  tensors.output = matrix("o_proj.weight", spec.hidden_size, query);
  tensors.gate_up = matrix("gate_proj.weight", 2 * spec.intermediate_size, spec.hidden_size);
  tensors.down = matrix("down_proj.weight", spec.hidden_size, spec.intermediate_size);
  tensors.input_norm = vector("input_layernorm.weight", spec.hidden_size);
  tensors.post_attention_norm = vector("post_attention_layernorm.weight", spec.hidden_size);
  tensors.query_bias = vector("q_proj.bias", query);
  tensors.key_bias = vector("k_proj.bias", key_value);
  tensors.value_bias = vector("v_proj.bias", key_value);
  tensors.output_bias = vector("o_proj.bias", spec.hidden_size);
  tensors.gate_up_bias = vector("gate_proj.bias", 2 * spec.intermediate_size);
  tensors.down_bias = vector("down_proj.bias", spec.hidden_size);
  tensors.query_norm = vector("q_norm.weight", spec.head_dim);
  tensors.key_norm = vector("k_norm.weight", spec.head_dim);
  return tensors;
}

ops::HeadTransform query_transform(const DecoderPass& pass) {
  return {.bias = pass.weights.query_bias,
          .norm_weight = pass.weights.query_norm,
          .norm_eps = pass.spec.rms_norm_eps,
          .cos = pass.rope.cos,
          .sin = pass.rope.sin,
          .positions = pass.positions};
}

ops::HeadTransform key_transform(const DecoderPass& pass) {
  ops::HeadTransform transform = query_transform(pass);
  transform.bias = pass.weights.key_bias;
  transform.norm_weight = pass.weights.key_norm;
  return transform;
}

ops::HeadTransform value_transform(const DecoderPass& pass) {
  ops::HeadTransform transform;
  transform.bias = pass.weights.value_bias;
  return transform;
}

/// The three columns of heads in the fused gradient (T, q + 2c), and the two in key_value_raw (T, 2c).
struct Columns {
  explicit Columns(const ModelSpec& spec)
      : query_size(spec.query_size()), key_value_size(spec.key_value_size()) {}
  ops::HeadColumns raw_query() const { return {query_size, 0}; }
  ops::HeadColumns raw_key() const { return {2 * key_value_size, 0}; }
  ops::HeadColumns raw_value() const { return {2 * key_value_size, key_value_size}; }
  ops::HeadColumns fused(std::int64_t first_column) const {
    return {query_size + 2 * key_value_size, first_column};
  }

  std::int64_t query_size;
  std::int64_t key_value_size;
};

TensorView chunk_rows(const DecoderPass& pass, TensorView group_tensor) {
  return group_tensor.rows(pass.chunk.offset_in_group, pass.chunk.num_tokens);
}

ops::AttentionSettings attention_settings(const DecoderPass& pass) {
  return {.scale = 1.0 / std::sqrt(static_cast<double>(pass.spec.head_dim)),
          .deterministic = pass.deterministic};
}

std::vector<ops::AttentionSegment> attention_segments(const DecoderPass& pass) {
  return apply_pattern(pass.spec.pattern_of(pass.layer), pass.chunk.segments);
}

/// Keys and values that the chunk's queries can see.
ConstTensorView visible(const DecoderPass& pass, TensorView group_tensor) {
  return group_tensor.rows(0, pass.chunk.offset_in_group + pass.chunk.num_tokens);
}

void input_norm(const ops::Context& context, const DecoderPass& pass) {
  ops::rms_norm_forward(context, pass.scratch.normed, pass.x, pass.weights.input_norm,
                        pass.spec.rms_norm_eps);
}

void post_attention_norm(const ops::Context& context, const DecoderPass& pass) {
  ops::rms_norm_forward(context, pass.scratch.normed, pass.intermediates.residual,
                        pass.weights.post_attention_norm, pass.spec.rms_norm_eps);
}

ops::HeadTransformForward query_heads(const DecoderPass& pass) {
  return {pass.scratch.query, pass.intermediates.query_raw, Columns(pass.spec).raw_query(),
          query_transform(pass)};
}

ops::HeadTransformForward key_heads(const DecoderPass& pass) {
  return {chunk_rows(pass, pass.group.key), pass.intermediates.key_value_raw, Columns(pass.spec).raw_key(),
          key_transform(pass)};
}

ops::HeadTransformForward value_heads(const DecoderPass& pass) {
  return {chunk_rows(pass, pass.group.value), pass.intermediates.key_value_raw,
          Columns(pass.spec).raw_value(), value_transform(pass)};
}

void write_query_key_value(const ops::Context& context, const DecoderPass& pass) {
  ops::head_transform_forward(context, std::array{query_heads(pass), key_heads(pass), value_heads(pass)});
}

void write_key_value(const ops::Context& context, const DecoderPass& pass) {
  ops::head_transform_forward(context, std::array{key_heads(pass), value_heads(pass)});
}

void write_query(const ops::Context& context, const DecoderPass& pass) {
  ops::head_transform_forward(context, std::array{query_heads(pass)});
}

void attend(const ops::Context& context, const DecoderPass& pass) {
  ops::attention_forward(context,
                         {.o = pass.intermediates.attention,
                          .lse = pass.intermediates.lse,
                          .q = pass.scratch.query,
                          .k = visible(pass, pass.group.key),
                          .v = visible(pass, pass.group.value)},
                         attention_segments(pass), attention_settings(pass));
}

TensorView attention_as_matrix(const DecoderPass& pass) {
  return pass.intermediates.attention.reshape({pass.chunk.num_tokens, pass.spec.query_size()});
}

/// out = residual + x · wᵀ (+ bias); out may not be residual.
void project_onto_residual(const ops::Context& context, TensorView out, ConstTensorView residual,
                           ConstTensorView x, ConstTensorView weight, ConstTensorView bias) {
  if (!bias) return ops::linear_forward(context, out, x, weight, residual);
  ops::linear_forward(context, out, x, weight);
  ops::add_bias(context, out, bias);
  ops::add(context, out, residual, out);
}

/// residual = x + attention · Woᵀ (+ bias).
void write_residual(const ops::Context& context, const DecoderPass& pass) {
  project_onto_residual(context, pass.intermediates.residual, pass.x, attention_as_matrix(pass),
                        pass.weights.output, pass.weights.output_bias);
}

/// @pre scratch.normed holds the normed residual.
void write_gate_up(const ops::Context& context, const DecoderPass& pass) {
  ops::linear_forward(context, pass.intermediates.gate_up, pass.scratch.normed, pass.weights.gate_up);
  if (pass.weights.gate_up_bias)
    ops::add_bias(context, pass.intermediates.gate_up, pass.weights.gate_up_bias);
}

/// Nothing for a matrix that has none.
void add_weight_gradient(const ops::Context& context, TensorView dweight, ConstTensorView dy,
                         ConstTensorView x, bool accumulate) {
  if (dweight) ops::linear_backward_weight(context, dweight, dy, x, accumulate);
}

void mlp_backward(const ops::Context& context, const DecoderPass& pass, TensorView dy_dx,
                  const DecoderGradients& gradients) {
  const DecoderScratch& scratch = pass.scratch;
  TensorView gate_up = pass.intermediates.gate_up;
  const bool accumulate = !pass.overwrites_matrix_gradients;
  const TensorView dactivation = scratch.activation;
  ops::linear_backward_input(context, dactivation, dy_dx, pass.weights.down);
  const TensorView dgate_up = gate_up;
  // One pass over the largest tensors makes the activation again as well, in its gradient's place.
  ops::swiglu_backward(context, dgate_up, dactivation, gate_up, scratch.activation);
  add_weight_gradient(context, gradients.down, dy_dx, scratch.activation, accumulate);
  if (gradients.down_bias) ops::bias_backward(context, gradients.down_bias, dy_dx);

  ops::linear_backward_input(context, scratch.dhidden, dgate_up, pass.weights.gate_up);
  // The norm's gradient comes first, as its pass over the residual makes the matrix' input again as well.
  ops::rms_norm_backward(context, {.dx = dy_dx,
                                   .dweight = gradients.post_attention_norm,
                                   .y = scratch.normed,
                                   .dy = scratch.dhidden,
                                   .x = pass.intermediates.residual,
                                   .weight = pass.weights.post_attention_norm,
                                   .residual = dy_dx,
                                   .eps = pass.spec.rms_norm_eps});
  add_weight_gradient(context, gradients.gate_up, dgate_up, scratch.normed, accumulate);
  if (gradients.gate_up_bias) ops::bias_backward(context, gradients.gate_up_bias, dgate_up);
}

void attention_backward(const ops::Context& context, const DecoderPass& pass, TensorView dresidual_dx,
                        const DecoderGradients& gradients) {
  const DecoderScratch& scratch = pass.scratch;
  const Columns columns(pass.spec);
  const std::int64_t tokens = pass.chunk.num_tokens;
  const bool accumulate = !pass.overwrites_matrix_gradients;
  add_weight_gradient(context, gradients.output, dresidual_dx, attention_as_matrix(pass), accumulate);
  if (gradients.output_bias) ops::bias_backward(context, gradients.output_bias, dresidual_dx);
  ops::linear_backward_input(context, scratch.dattention.reshape({tokens, pass.spec.query_size()}),
                             dresidual_dx, pass.weights.output);

  const std::int64_t visible_tokens = pass.chunk.offset_in_group + tokens;
  ops::attention_backward(context,
                          {.dq = scratch.dquery,
                           .dk = pass.group.dkey.rows(0, visible_tokens),
                           .dv = pass.group.dvalue.rows(0, visible_tokens),
                           .dout = scratch.dattention,
                           .q = scratch.query,
                           .k = visible(pass, pass.group.key),
                           .v = visible(pass, pass.group.value),
                           .o = pass.intermediates.attention,
                           .lse = pass.intermediates.lse,
                           .accumulate = !pass.overwrites_key_gradients},
                          attention_segments(pass), attention_settings(pass));

  // Every query at or after this chunk has now been seen, so the chunk's own key and value gradients
  // are complete.
  const std::array<ops::HeadGroupBackward, 3> groups{
      {{{.draw = scratch.dquery_key_value,
         .draw_columns = columns.fused(0),
         .dout = scratch.dquery,
         .raw = pass.intermediates.query_raw,
         .raw_columns = columns.raw_query(),
         .dbias = gradients.query_bias,
         .dnorm_weight = gradients.query_norm},
        query_transform(pass)},
       {{.draw = scratch.dquery_key_value,
         .draw_columns = columns.fused(columns.query_size),
         .dout = chunk_rows(pass, pass.group.dkey),
         .raw = pass.intermediates.key_value_raw,
         .raw_columns = columns.raw_key(),
         .dbias = gradients.key_bias,
         .dnorm_weight = gradients.key_norm},
        key_transform(pass)},
       {{.draw = scratch.dquery_key_value,
         .draw_columns = columns.fused(columns.query_size + columns.key_value_size),
         .dout = chunk_rows(pass, pass.group.dvalue),
         .raw = pass.intermediates.key_value_raw,
         .raw_columns = columns.raw_value(),
         .dbias = gradients.value_bias,
         .dnorm_weight = {}},
        value_transform(pass)}}};
  ops::head_transform_backward(context, groups);

  ops::linear_backward_input(context, scratch.dhidden, scratch.dquery_key_value,
                             pass.weights.query_key_value);
  ops::rms_norm_backward(context, {.dx = dresidual_dx,
                                   .dweight = gradients.input_norm,
                                   .y = scratch.normed,
                                   .dy = scratch.dhidden,
                                   .x = pass.x,
                                   .weight = pass.weights.input_norm,
                                   .residual = dresidual_dx,
                                   .eps = pass.spec.rms_norm_eps});
  add_weight_gradient(context, gradients.query_key_value, scratch.dquery_key_value, scratch.normed,
                      accumulate);
}

}  // namespace

DecoderWeights bind_decoder_weights(const ModelSpec& spec, const BlockLayout& block, const void* matrices,
                                    DType matrix_dtype, const void* vectors, DType vector_dtype) {
  return bind<ConstTensorView>(spec, block, matrices, matrix_dtype, vectors, vector_dtype);
}

DecoderGradients bind_decoder_gradients(const ModelSpec& spec, const BlockLayout& block, void* gradients,
                                        DType dtype) {
  void* const vectors = static_cast<std::byte*>(gradients) +
                        static_cast<std::size_t>(block.num_matrix_elements) * size_of(dtype);
  return bind<TensorView>(spec, block, gradients, dtype, vectors, dtype);
}

DecoderGradients bind_vector_gradients(const ModelSpec& spec, const BlockLayout& block, void* vectors,
                                       DType dtype) {
  DecoderGradients gradients = bind<TensorView>(spec, block, vectors, dtype, vectors, dtype);
  gradients.query_key_value = gradients.output = gradients.gate_up = gradients.down = {};
  return gradients;
}

void decoder_forward(const ops::Context& context, const DecoderPass& pass, TensorView y) {
  const DecoderIntermediates& save = pass.intermediates;
  input_norm(context, pass);
  ops::linear_forward(context, save.query_raw, pass.scratch.normed, pass.weights.query());
  ops::linear_forward(context, save.key_value_raw, pass.scratch.normed, pass.weights.key_value());
  write_query_key_value(context, pass);
  attend(context, pass);
  write_residual(context, pass);

  post_attention_norm(context, pass);
  write_gate_up(context, pass);
  ops::swiglu_forward(context, pass.scratch.activation, save.gate_up);
  project_onto_residual(context, y, save.residual, pass.scratch.activation, pass.weights.down,
                        pass.weights.down_bias);
}

void decoder_rebuild_key_value(const ops::Context& context, const DecoderPass& pass,
                               const SavedIntermediates& saved) {
  if (!saved.projections) {
    input_norm(context, pass);
    ops::linear_forward(context, pass.intermediates.key_value_raw, pass.scratch.normed,
                        pass.weights.key_value());
  }
  write_key_value(context, pass);
}

void decoder_backward(const ops::Context& context, const DecoderPass& pass, const SavedIntermediates& saved,
                      TensorView dy_dx, const DecoderGradients& gradients) {
  if (!saved.projections) {
    input_norm(context, pass);
    ops::linear_forward(context, pass.intermediates.query_raw, pass.scratch.normed, pass.weights.query());
  }
  write_query(context, pass);
  if (!saved.attention) attend(context, pass);
  if (!saved.projections) {
    write_residual(context, pass);
    post_attention_norm(context, pass);
    write_gate_up(context, pass);
  }
  mlp_backward(context, pass, dy_dx, gradients);
  attention_backward(context, pass, dy_dx, gradients);
}

std::size_t decoder_workspace(const ModelSpec& spec, std::int64_t chunk_tokens, std::int64_t group_tokens,
                              DType compute, bool deterministic, std::int64_t longest_row, bool on_gpu) {
  ops::AttentionLimits limits{.num_attention_heads = spec.num_attention_heads,
                              .num_key_value_heads = spec.num_key_value_heads,
                              .head_dim = spec.head_dim,
                              .compute = compute,
                              .queries = chunk_tokens,
                              .keys = group_tokens,
                              .window = 0,
                              .deterministic = deterministic,
                              .longest = longest_row};
  std::size_t attention = 0;
  std::optional<AttentionPattern> before;
  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    const AttentionPattern pattern = spec.pattern_of(layer);
    if (pattern == before) continue;
    before = pattern;
    limits.window = pattern.window;
    limits.several_ranges = pattern.has_several_ranges();
    attention =
        std::max(attention, on_gpu ? ops::gpu_attention_workspace(limits) : ops::attention_workspace(limits));
  }
  return std::max({on_gpu ? ops::gpu_linear_workspace : ops::linear_workspace(compute), attention,
                   ops::rms_norm_backward_workspace(chunk_tokens, spec.hidden_size, compute),
                   ops::head_transform_backward_workspace(chunk_tokens, spec.num_attention_heads,
                                                          spec.head_dim, compute)});
}

}  // namespace layerstream
