#pragma once

#include <span>

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops {

/// Queries and a range of keys that they may see. Segments that follow each other and have the same queries
/// are one *run*: the keys of a query are those that it sees in any of the run's ranges, which share none.
struct AttentionSegment {
  std::int64_t first_query = 0;  ///< row of q, o, dq
  std::int64_t num_queries = 0;
  std::int64_t first_key = 0;  ///< row of k, v, dk, dv
  std::int64_t num_keys = 0;
  /// Bottom-right causal: the last query sees all `num_keys` keys, the one before it all but one, and so on
  /// (num_keys >= num_queries). If not, every query sees all of them (at least one).
  bool causal = true;
  std::int64_t window = 0;  ///< causal: a query sees at most the last `window` of them; 0: all
};

/// Pairs of a query and a key that it sees.
std::int64_t visible_pairs(std::span<const AttentionSegment> segments);

struct AttentionSettings {
  double scale = 1.0;  ///< of q·k, usually head_dim^-0.5
  /// Backward gives the same bits each time. Only a CUDA build with bf16 can do without, and is faster then.
  bool deterministic = true;
};

struct AttentionForward {
  TensorView o;       ///< (T, NH, d) compute dtype
  TensorView lse;     ///< (T, NH) accumulator dtype: log-sum-exp of the scaled scores
  ConstTensorView q;  ///< (T, NH, d) compute dtype
  ConstTensorView k;  ///< (S, NKV, d) compute dtype; query head h uses key head h / (NH / NKV)
  ConstTensorView v;  ///< (S, NKV, d)
};
/// Exact softmax attention with grouped queries; scores and sums in the accumulator dtype. The runs of
/// `segments` cover each query once. Needs workspace: attention_workspace(...) of the call's own extents.
void attention_forward(const Context& context, const AttentionForward& args,
                       std::span<const AttentionSegment> segments, const AttentionSettings& settings);

struct AttentionBackward {
  TensorView dq;                    ///< (T, NH, d) compute dtype, written
  TensorView dk;                    ///< (S, NKV, d) accumulator dtype
  TensorView dv;                    ///< (S, NKV, d) accumulator dtype
  ConstTensorView dout;             ///< (T, NH, d) compute dtype
  ConstTensorView q, k, v, o, lse;  ///< as in forward
  /// Whether dk and dv are added to. If not, all of their rows are written, with the bits that adding to
  /// zeros would leave; rows that no query sees become zero.
  bool accumulate = true;
};
/// As in Dao, "FlashAttention-2" (2023): probabilities are rebuilt from lse; D = rowsum(dout · o).
/// Sums into dk and dv run over the queries and the heads of a group in a fixed order. Segments may share
/// keys; then they are added in the order given.
void attention_backward(const Context& context, const AttentionBackward& args,
                        std::span<const AttentionSegment> segments, const AttentionSettings& settings);

/// Upper bounds on the calls that a workspace has to serve.
struct AttentionLimits {
  std::int64_t num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0;
  DType compute = DType::f32;
  std::int64_t queries = 0;  ///< T of a call
  std::int64_t keys = 0;     ///< S of a call
  std::int64_t window = 0;   ///< the widest; 0: none
  bool deterministic = true;
  std::int64_t longest = 0;     ///< queries or keys of a segment; 0: as many as there are
  bool several_ranges = false;  ///< whether a run may have more than one segment
};

/// Bytes of workspace that suffice for either direction of every call within the limits; asks no device. In a
/// CPU build it depends on heads, head_dim and compute only.
std::size_t attention_workspace(const AttentionLimits& limits);

/// The same for a GPU, in any build: for plans of machines that are not here. Where cuDNN does not compute,
/// what this build needs.
std::size_t gpu_attention_workspace(const AttentionLimits& limits);

/// Whether probabilities and gradients of scores, P and dS of FlashAttention, are rounded to the compute
/// dtype before they are multiplied with v, k, q and dout, and each query head's part of dk and dv before it
/// is added. So it is in a CUDA build where cuDNN computes: bf16 with a head_dim that is a multiple of 8, up
/// to 128. The outputs of a run's ranges are rounded likewise before they are joined.
bool attention_rounds_products(std::int64_t head_dim, DType compute);

}  // namespace layerstream::ops
