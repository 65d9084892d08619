#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/half.hpp"
#include "ops/attention.hpp"

/// What the implementations of attention share: the checked shape of a call, and who sees whom.
namespace layerstream::ops::detail {

struct AttentionShape {
  std::int64_t heads, key_heads, head_dim;
  double scale;
  std::int64_t window;
  bool deterministic;

  LAYERSTREAM_FUNCTION std::int64_t group() const { return heads / key_heads; }
  LAYERSTREAM_FUNCTION std::int64_t query_stride() const { return heads * head_dim; }
  LAYERSTREAM_FUNCTION std::int64_t key_stride() const { return key_heads * head_dim; }

  /// Of a call with these extents.
  AttentionLimits limits(DType compute, std::int64_t queries, std::int64_t keys,
                         std::span<const AttentionSegment> segments) const {
    std::int64_t longest = 1;
    for (const AttentionSegment& segment : segments) longest = std::max(longest, segment.num_keys);
    return {heads, key_heads, head_dim, compute, queries, keys, window, deterministic, longest};
  }
};

/// The two directions after all checks but that of the workspace, with at least one query: on the host
/// (attention_forward.cpp, attention_backward.cpp) or a CUDA device (cuda/attention.cpp).
void attention_forward(const Context& context, const AttentionForward& args,
                       std::span<const AttentionSegment> segments, const AttentionShape& shape);
void attention_backward(const Context& context, const AttentionBackward& args,
                        std::span<const AttentionSegment> segments, const AttentionShape& shape);
/// dk = dv = 0.
void clear_key_gradients(const Context& context, const AttentionBackward& args);
std::size_t attention_workspace(const AttentionLimits& limits);
bool attention_rounds_products(std::int64_t head_dim, DType compute);

struct Interval {
  std::int64_t begin = 0, end = 0;
  LAYERSTREAM_FUNCTION std::int64_t size() const { return end - begin; }
};

/// Keys of the segment that query `query` of the segment sees.
LAYERSTREAM_FUNCTION inline Interval visible_keys(const AttentionSegment& segment, std::int64_t window,
                                                  std::int64_t query) {
  const std::int64_t end = query + segment.num_keys - segment.num_queries + 1;
  return {window > 0 ? std::max<std::int64_t>(0, end - window) : 0, end};
}

/// Keys that some query of a run of `queries` sees.
LAYERSTREAM_FUNCTION inline Interval visible_keys(const AttentionSegment& segment, std::int64_t window,
                                                  Interval queries) {
  return {visible_keys(segment, window, queries.begin).begin,
          visible_keys(segment, window, queries.end - 1).end};
}

/// Queries of the segment that see any key in `keys`.
LAYERSTREAM_FUNCTION inline Interval seeing_queries(const AttentionSegment& segment, std::int64_t window,
                                                    Interval keys) {
  const std::int64_t earlier = segment.num_keys - segment.num_queries;
  const std::int64_t begin = std::max<std::int64_t>(0, keys.begin - earlier);
  if (window == 0) return {begin, segment.num_queries};
  return {begin, std::min(segment.num_queries, keys.end - 1 + window - earlier)};
}

LAYERSTREAM_FUNCTION constexpr std::int64_t tiles(std::int64_t extent, std::int64_t tile) {
  return (extent + tile - 1) / tile;
}

/// How many leading segments have keys that ascend and so do not overlap; at least one if there is any.
inline std::size_t leading_disjoint(std::span<const AttentionSegment> segments) {
  std::int64_t end = 0;
  std::size_t count = 0;
  while (count < segments.size() && (count == 0 || segments[count].first_key >= end)) {
    end = std::max(end, segments[count].first_key + segments[count].num_keys);
    ++count;
  }
  return count;
}

}  // namespace layerstream::ops::detail
