#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/detail/attention_shape.hpp"

/// What the fused kernels of attention, cuDNN's, want of workspace, and how much of it a call gets.
namespace layerstream::ops::detail {

/// The most that a plan may want, and the most entries of a ragged call. With 28 / 4 heads of 128 the
/// deterministic backward pass of 16 x 1,024, 4 x 4,096 or 8,192 tokens is one call, and a longer row is cut
/// into tiles of 8,192. Fixed, because where a row is cut decides about bits.
inline constexpr std::size_t attention_plan_bytes = std::size_t{4} << 30;
inline constexpr std::int64_t attention_call_entries = 128;

/// Head sizes that cuDNN 9.19 computes on sm_90, either direction, deterministic or not.
constexpr bool cudnn_supports(std::int64_t head_dim, DType compute) {
  return compute == DType::bf16 && head_dim % 8 == 0 && head_dim <= 128;
}

/// Sizes of the backward pass, of which cuDNN's documentation says nothing. Found by asking cuDNN 9.19 for
/// sm_90 for its plans of 500 shapes; a plan that wants more is refused where it is built.
struct AttentionCost {
  std::int64_t heads, key_heads, head_dim;
  bool deterministic;

  /// Bytes that cuDNN wants for a plan.
  std::size_t forward_bytes(std::int64_t batch) const;
  std::size_t backward_bytes(std::int64_t batch, std::int64_t queries, std::int64_t keys) const;
  /// The most queries and keys of one entry: a power of two, as large as attention_plan_bytes allows.
  /// @throws ResourceError if not even the shortest entry fits.
  std::int64_t tile() const;
};

/// The shortest extent of a plan that is not exact, and the multiple that exact extents are of.
inline constexpr std::int64_t shortest_bucket = 128;
inline constexpr std::int64_t round_extent = 128;

constexpr std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Extent of the plan for entries of `tokens`: a power of two, at least 128.
std::int64_t attention_bucket(std::int64_t tokens);

/// The workspace of fused attention: bytes from its beginning to each part.
struct AttentionWorkspaceLayout {
  explicit AttentionWorkspaceLayout(const AttentionLimits& given);

  std::size_t table = 0;  ///< offsets and lengths of a ragged call
  /// Backward: (batch, NH, queries) fp32, for a call that is not ragged. Forward: (T, NH) of a call that
  /// joins.
  std::size_t lse = 0;
  std::size_t dk = 0, dv = 0;  ///< (rows, NKV, d) bf16
  /// (rows, NH, d) bf16 and fp32: a part after the first, the sum of parts. In forward the first of them
  /// holds o of a call that joins.
  std::size_t dq = 0, dq_sum = 0;
  std::size_t plan = 0;  ///< what cuDNN asks for, the last part
  std::size_t plan_bytes = 0;
  std::size_t bytes = 0;  ///< of everything
};

/// Bytes of AttentionWorkspaceLayout::table: row offsets of queries, keys and lse (batch + 1) int64, and
/// lengths of queries and keys (batch) int32.
std::size_t attention_table_bytes(std::int64_t batch);

}  // namespace layerstream::ops::detail
