#pragma once

#include <cstdint>
#include <span>

#include "core/tensor.hpp"
#include "longctx/chunk_plan.hpp"
#include "model/layout.hpp"
#include "model/spec.hpp"
#include "ops/context.hpp"

namespace layerstream {

/// A decoder layer's learnable tensors, or their gradients, bound to memory. h hidden, q = NH·d query,
/// c = NKV·d key (or value), f intermediate size. Optional ones are empty views.
template <class View>
struct DecoderTensors {
  View query_key_value;  ///< (q + 2c, h): q_proj, k_proj, v_proj one below the other
  View output;           ///< (h, q)
  View gate_up;          ///< (2f, h): gate_proj, up_proj
  View down;             ///< (h, f)
  View input_norm;       ///< (h)
  View post_attention_norm;
  View query_bias, key_bias, value_bias;  ///< (q), (c), (c)
  View output_bias;                       ///< (h)
  View gate_up_bias, down_bias;           ///< (2f), (h)
  View query_norm, key_norm;              ///< (d)

  View query() const { return query_key_value.rows(0, output.dim(1)); }
  View key_value() const {
    return query_key_value.rows(output.dim(1), query_key_value.dim(0) - output.dim(1));
  }
};
using DecoderWeights = DecoderTensors<ConstTensorView>;
using DecoderGradients = DecoderTensors<TensorView>;

/// Binds a block's slab: `matrices` points to the slab's first element in `matrix_dtype`, `vectors` to
/// its first vector element in `vector_dtype`.
DecoderWeights bind_decoder_weights(const ModelSpec& spec, const BlockLayout& block, const void* matrices,
                                    DType matrix_dtype, const void* vectors, DType vector_dtype);
/// Gradients of the whole slab in one buffer of accumulator dtype.
DecoderGradients bind_decoder_gradients(const ModelSpec& spec, const BlockLayout& block, void* gradients,
                                        DType dtype);

/// Gradients of the block's vectors alone, at `vectors`; those of matrices are empty.
DecoderGradients bind_vector_gradients(const ModelSpec& spec, const BlockLayout& block, void* vectors,
                                       DType dtype);

/// What the forward pass computes on the way for one chunk of T tokens. Each view is saved for the
/// backward pass or is scratch; which, is the executor's affair.
struct DecoderIntermediates {
  TensorView query_raw;      ///< (T, q) compute dtype, the projection before bias, norm and rope
  TensorView key_value_raw;  ///< (T, 2c)
  TensorView attention;      ///< (T, NH, d)
  TensorView lse;            ///< (T, NH) accumulator dtype
  TensorView residual;       ///< (T, h): x + attention output
  TensorView gate_up;        ///< (T, 2f); the backward pass overwrites it with its gradient
};

/// Keys and values of one group (see ChunkGroup), S tokens, and in the backward pass their gradients.
struct GroupKeyValue {
  TensorView key, value;    ///< (S, NKV, d) compute dtype
  TensorView dkey, dvalue;  ///< (S, NKV, d) accumulator dtype
};

/// Scratch for one chunk; backward members are empty in a forward-only run.
struct DecoderScratch {
  TensorView normed;            ///< (T, h)
  TensorView query;             ///< (T, NH, d)
  TensorView activation;        ///< (T, f)
  TensorView dhidden;           ///< (T, h)
  TensorView dattention;        ///< (T, NH, d)
  TensorView dquery;            ///< (T, NH, d)
  TensorView dquery_key_value;  ///< (T, q + 2c)
};

struct RopeTables {
  ConstTensorView cos, sin;  ///< (P, d/2) accumulator dtype
};

/// Everything that a decoder layer needs to work on one chunk.
struct DecoderPass {
  const ModelSpec& spec;
  std::int64_t layer;
  const DecoderWeights& weights;
  const Chunk& chunk;
  RopeTables rope;
  ConstTensorView positions;  ///< (T) int32
  ConstTensorView x;          ///< (T, h) the block's input
  DecoderIntermediates intermediates;
  GroupKeyValue group;
  DecoderScratch scratch;
  /// The block's first chunk of the step: gradients of matrices are written, whatever the buffer held.
  bool overwrites_matrix_gradients = false;
  bool deterministic = true;  ///< see ops::AttentionSettings
  /// Backward of the group's last chunk, which comes first: it overwrites the group's dkey and dvalue. Where
  /// no chunk does, they are zero before.
  bool overwrites_key_gradients = false;
};

/// Which intermediates the backward pass finds ready; the rest it computes again, with the same
/// operations on the same shapes and so with the same bits.
struct SavedIntermediates {
  bool attention = false;    ///< attention and lse
  bool projections = false;  ///< query_raw, key_value_raw, residual, gate_up
};

/// y = the block's output for the chunk; appends the chunk's keys and values to the group's.
/// @param y (T, h); may not alias x.
void decoder_forward(const ops::Context& context, const DecoderPass& pass, TensorView y);

/// Writes the chunk's rows of the group's keys and values, from key_value_raw when it is saved.
void decoder_rebuild_key_value(const ops::Context& context, const DecoderPass& pass,
                               const SavedIntermediates& saved);

/// @pre The group's keys and values up to and including this chunk stand in `pass.group`, and every
/// later chunk of the group has been through this function.
/// @param dy_dx (T, h): the gradient of the output, replaced by that of the input.
/// Adds to `gradients`, or writes those of matrices (DecoderPass::overwrites_matrix_gradients), but for the
/// empty ones of matrices, which are not computed.
void decoder_backward(const ops::Context& context, const DecoderPass& pass, const SavedIntermediates& saved,
                      TensorView dy_dx, const DecoderGradients& gradients);

/// Bytes of ops::Context::workspace that the three functions need for chunks of up to `chunk_tokens` in
/// groups of up to `group_tokens`. @param longest_row tokens; 0: as long as a group
/// @param on_gpu of a GPU, whichever build this is: its products and attention, which need the most
std::size_t decoder_workspace(const ModelSpec& spec, std::int64_t chunk_tokens, std::int64_t group_tokens,
                              DType compute, bool deterministic, std::int64_t longest_row = 0,
                              bool on_gpu = false);

}  // namespace layerstream
