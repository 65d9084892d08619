#pragma once

#include "ops/detail/attention_shape.hpp"

/// Attention without tensor cores, for every compute dtype and head sizes up to 512: the sums of scores,
/// outputs and gradients are fused multiply-adds in the accumulator dtype, in a fixed order; nothing is
/// rounded to bf16 but o and dq. Asynchronous on the context's stream.
namespace layerstream::ops::cuda {

/// @throws ContractError for a head_dim above 512.
void blockwise_attention_forward(const Context& context, const AttentionForward& args,
                                 std::span<const AttentionSegment> segments,
                                 const detail::AttentionShape& shape);
void blockwise_attention_backward(const Context& context, const AttentionBackward& args,
                                  std::span<const AttentionSegment> segments,
                                  const detail::AttentionShape& shape);
std::size_t blockwise_attention_workspace(const AttentionLimits& limits);

}  // namespace layerstream::ops::cuda
