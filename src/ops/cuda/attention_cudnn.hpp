#pragma once

#include "ops/detail/attention_shape.hpp"

/// bf16 attention by cuDNN. q, k, v, o, dout and dq are read and written where they lie; cuDNN's bf16 parts
/// of dk and dv go through the workspace and are stored or added in fp32. Asynchronous on the context's
/// stream; the first call with a new plan takes about a second.
namespace layerstream::ops::cuda {

void cudnn_attention_forward(const Context& context, const AttentionForward& args,
                             std::span<const AttentionSegment> segments, const detail::AttentionShape& shape);
void cudnn_attention_backward(const Context& context, const AttentionBackward& args,
                              std::span<const AttentionSegment> segments,
                              const detail::AttentionShape& shape);
std::size_t cudnn_attention_workspace(const AttentionLimits& limits);

}  // namespace layerstream::ops::cuda
