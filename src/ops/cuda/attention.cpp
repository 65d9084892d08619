#include "ops/cuda/attention_blockwise.hpp"
#include "ops/cuda/attention_cudnn.hpp"
#include "ops/detail/attention_cost.hpp"

namespace layerstream::ops {

void detail::attention_forward(const Context& context, const AttentionForward& args,
                               std::span<const AttentionSegment> segments, const AttentionShape& shape) {
  if (detail::cudnn_supports(shape.head_dim, args.q.dtype())) {
    cuda::cudnn_attention_forward(context, args, segments, shape);
  } else {
    cuda::blockwise_attention_forward(context, args, segments, shape);
  }
}

void detail::attention_backward(const Context& context, const AttentionBackward& args,
                                std::span<const AttentionSegment> segments, const AttentionShape& shape) {
  if (detail::cudnn_supports(shape.head_dim, args.q.dtype())) {
    cuda::cudnn_attention_backward(context, args, segments, shape);
  } else {
    cuda::blockwise_attention_backward(context, args, segments, shape);
  }
}

std::size_t detail::attention_workspace(const AttentionLimits& limits) {
  return detail::cudnn_supports(limits.head_dim, limits.compute) ? cuda::cudnn_attention_workspace(limits)
                                                               : cuda::blockwise_attention_workspace(limits);
}

bool detail::attention_rounds_products(std::int64_t head_dim, DType compute) {
  return detail::cudnn_supports(head_dim, compute);
}

}  // namespace layerstream::ops
