#pragma once

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// y[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight, as in Zhang & Sennrich, "Root Mean Square
/// Layer Normalization" (2019).
/// @param y, x (T, H) compute dtype; y may be x.
/// @param weight (H) accumulator dtype.
/// Like Hugging Face's modules, the normalised value is rounded to the compute dtype before it meets
/// the weight.
void rms_norm_forward(const Context& context, TensorView y, ConstTensorView x, ConstTensorView weight,
                      double eps);

struct RmsNormBackward {
  TensorView dx;       ///< (T, H) compute dtype; = residual + gradient; may be `residual` or `dy`
  TensorView dweight;  ///< (H) accumulator dtype; added to
  /// (T, H) compute dtype, the forward pass's output again, with its bits; shares memory with no other;
  /// empty: not wanted
  TensorView y = {};
  ConstTensorView dy;        ///< (T, H) compute dtype
  ConstTensorView x;         ///< (T, H) compute dtype, the input of the forward pass
  ConstTensorView weight;    ///< (H) accumulator dtype
  ConstTensorView residual;  ///< (T, H) compute dtype, the gradient that bypasses the norm; empty: none
  double eps = 0.0;
};
/// Statistics are recomputed from x. Needs workspace: rms_norm_backward_workspace(T, H, dtype of x).
void rms_norm_backward(const Context& context, const RmsNormBackward& args);
std::size_t rms_norm_backward_workspace(std::int64_t tokens, std::int64_t hidden_size, DType compute);

}  // namespace layerstream::ops
