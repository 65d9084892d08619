#pragma once

#include <cstdint>

#include "core/tensor.hpp"
#include "model/spec.hpp"
#include "ops/context.hpp"

namespace layerstream {

/// Final norm and LM head.
template <class View>
struct HeadTensors {
  View norm;    ///< (h) accumulator dtype
  View matrix;  ///< (V, h): lm_head, or the embedding table when they are tied
};
using HeadWeights = HeadTensors<ConstTensorView>;
using HeadGradients = HeadTensors<TensorView>;  ///< both in the accumulator dtype

/// Buffers for one tile of t tokens: full logits never exist.
struct HeadScratch {
  TensorView normed;   ///< (t, h) compute dtype
  TensorView dnormed;  ///< (t, h)
  TensorView logits;   ///< (t, V) accumulator dtype
  TensorView dlogits;  ///< (t, V) compute dtype
  TensorView nll;      ///< (t) fp64
};

struct HeadPass {
  const ModelSpec& spec;
  const HeadWeights& weights;
  ConstTensorView x;        ///< (T, h) the last decoder layer's output
  ConstTensorView targets;  ///< (T) int32
  HeadScratch scratch;      ///< t rows: the tile
  /// The first chunk of the step: the matrix's gradient is written, whatever the buffer held.
  bool overwrites_matrix_gradient = false;
};

/// Sum of negative log-likelihoods, tile by tile, tokens in order.
/// @param nll_sum device pointer; added to.
void head_loss(const ops::Context& context, const HeadPass& pass, double* nll_sum);

/// The same, and in the same sweep the gradient of nll_sum · scale.
/// @param dx (T, h), written; may be x. Adds to `gradients`, or writes that of the matrix
/// (HeadPass::overwrites_matrix_gradient), which is not computed if it is empty.
void head_loss_and_gradient(const ops::Context& context, const HeadPass& pass, double scale, TensorView dx,
                            const HeadGradients& gradients, double* nll_sum);

/// logits (T, V), accumulator dtype, of T <= t tokens.
void head_logits(const ops::Context& context, const HeadPass& pass, TensorView logits);

/// Bytes of ops::Context::workspace that these functions need.
std::size_t head_workspace(const ModelSpec& spec, std::int64_t tile_tokens, DType compute);

}  // namespace layerstream
