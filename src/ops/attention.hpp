#pragma once

#include <span>

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// A run of queries and the keys it may see: bottom-right causal, i.e. the last query sees all
/// `num_keys` keys, the one before it all but one, and so on (num_keys >= num_queries).
struct AttentionSegment {
  std::int64_t first_query = 0;  ///< row of q, o, dq
  std::int64_t num_queries = 0;
  std::int64_t first_key = 0;  ///< row of k, v, dk, dv
  std::int64_t num_keys = 0;
};

struct AttentionSettings {
  double scale = 1.0;       ///< of q·k, usually head_dim^-0.5
  std::int64_t window = 0;  ///< a query sees at most this many keys, its own included; 0: all
};

struct AttentionForward {
  TensorView o;       ///< (T, NH, d) compute dtype
  TensorView lse;     ///< (T, NH) accumulator dtype: log-sum-exp of the scaled scores
  ConstTensorView q;  ///< (T, NH, d) compute dtype
  ConstTensorView k;  ///< (S, NKV, d) compute dtype; query head h uses key head h / (NH / NKV)
  ConstTensorView v;  ///< (S, NKV, d)
};
/// Exact softmax attention with grouped queries; scores and sums in the accumulator dtype. `segments`
/// cover each query once. Needs workspace: attention_workspace(...).
void attention_forward(const Context& context, const AttentionForward& args,
                       std::span<const AttentionSegment> segments, const AttentionSettings& settings);

struct AttentionBackward {
  TensorView dq;                    ///< (T, NH, d) compute dtype, written
  TensorView dk;                    ///< (S, NKV, d) accumulator dtype, added to
  TensorView dv;                    ///< (S, NKV, d) accumulator dtype, added to
  ConstTensorView dout;             ///< (T, NH, d) compute dtype
  ConstTensorView q, k, v, o, lse;  ///< as in forward
};
/// As in Dao, "FlashAttention-2" (2023): probabilities are rebuilt from lse; D = rowsum(dout · o).
/// Sums into dk and dv run over queries, then over the heads of a group, in a fixed order. Segments may
/// share keys; then they are added in the order given.
void attention_backward(const Context& context, const AttentionBackward& args,
                        std::span<const AttentionSegment> segments, const AttentionSettings& settings);

/// Bytes of workspace that either direction needs for these shapes; independent of the sequence length.
std::size_t attention_workspace(std::int64_t num_attention_heads, std::int64_t num_key_value_heads,
                                std::int64_t head_dim, DType compute);

}  // namespace layerstream::ops
