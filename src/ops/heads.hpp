#pragma once

#include <span>

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// One group of attention heads (all query heads, or all key heads, or all value heads) inside the
/// output of a projection GEMM: T rows, `row_stride` elements apart, each with H·d elements of this
/// group from `first_column` on.
struct HeadColumns {
  std::int64_t row_stride = 0;
  std::int64_t first_column = 0;
};

/// What lies between a projection and the attention: bias, then RMS norm over each head (Qwen3), then
/// rotary embedding (Su et al., RoFormer, 2021; Hugging Face's half-rotation layout: element i pairs
/// with i + d/2). Each part is optional: an empty view leaves it out.
struct HeadTransform {
  ConstTensorView bias;         ///< (H·d) accumulator dtype
  ConstTensorView norm_weight;  ///< (d) accumulator dtype
  double norm_eps = 0.0;
  ConstTensorView cos;        ///< (P, d/2) accumulator dtype: row p is position p
  ConstTensorView sin;        ///< (P, d/2)
  ConstTensorView positions;  ///< (T) int32, each in [0, P)
};

/// Groups of one call, at most.
inline constexpr std::size_t most_head_groups = 4;

struct HeadTransformForward {
  TensorView out;       ///< (T, H, d) compute dtype
  ConstTensorView raw;  ///< (T, row_stride) compute dtype
  HeadColumns columns;
  HeadTransform transform;
};
/// out[t, h, :] = rope(norm(raw + bias)) of 1 to most_head_groups groups of the same T and dtype, in one
/// launch on a device. A group has the bits that a call of its own gives it.
/// In bf16 there is one rounding, at the end (Hugging Face rounds after each part, and within the rope its
/// tables, both products and their sum).
void head_transform_forward(const Context& context, std::span<const HeadTransformForward> groups);
/// Of one group.
void head_transform_forward(const Context& context, TensorView out, ConstTensorView raw, HeadColumns columns,
                            const HeadTransform& transform);

struct HeadTransformBackward {
  TensorView draw;  ///< (T, row_stride) compute dtype; only `columns` are written
  HeadColumns draw_columns;
  ConstTensorView dout;  ///< (T, H, d) compute or accumulator dtype
  ConstTensorView raw;   ///< as in forward; needed only with a norm
  HeadColumns raw_columns;
  TensorView dbias;         ///< (H·d) accumulator dtype, added to; empty without a bias
  TensorView dnorm_weight;  ///< (d) accumulator dtype, added to; empty without a norm
};
struct HeadGroupBackward {
  HeadTransformBackward args;
  HeadTransform transform;
};
/// Of 1 to most_head_groups groups of the same T and compute dtype; no two of them may share dbias or
/// dnorm_weight. draw has the bits that a call for each group gives; on a device dbias and dnorm_weight are
/// summed in an order that depends on the shapes of all groups of the call.
/// Needs workspace: the largest of the groups' head_transform_backward_workspace(T, H, d, compute dtype).
void head_transform_backward(const Context& context, std::span<const HeadGroupBackward> groups);
/// Of one group.
void head_transform_backward(const Context& context, const HeadTransformBackward& args,
                             const HeadTransform& transform);
std::size_t head_transform_backward_workspace(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                                              DType compute);

}  // namespace layerstream::ops
