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
  bool deterministic;

  LAYERSTREAM_FUNCTION std::int64_t group() const { return heads / key_heads; }
  LAYERSTREAM_FUNCTION std::int64_t query_stride() const { return heads * head_dim; }
  LAYERSTREAM_FUNCTION std::int64_t key_stride() const { return key_heads * head_dim; }

  /// Of a call with these extents.
  AttentionLimits limits(DType compute, std::int64_t queries, std::int64_t keys,
                         std::span<const AttentionSegment> segments) const;
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
LAYERSTREAM_FUNCTION inline Interval visible_keys(const AttentionSegment& segment, std::int64_t query) {
  if (!segment.causal) return {0, segment.num_keys};
  const std::int64_t end = query + segment.num_keys - segment.num_queries + 1;
  return {segment.window > 0 ? std::max<std::int64_t>(0, end - segment.window) : 0, end};
}

/// Keys that some query of `queries` sees.
LAYERSTREAM_FUNCTION inline Interval visible_keys(const AttentionSegment& segment, Interval queries) {
  return {visible_keys(segment, queries.begin).begin, visible_keys(segment, queries.end - 1).end};
}

/// Queries of the segment that see any key in `keys`.
LAYERSTREAM_FUNCTION inline Interval seeing_queries(const AttentionSegment& segment, Interval keys) {
  if (!segment.causal) return {0, segment.num_queries};
  const std::int64_t earlier = segment.num_keys - segment.num_queries;
  const std::int64_t begin = std::max<std::int64_t>(0, keys.begin - earlier);
  const bool hides = segment.window > 0 && segment.window < segment.num_keys;
  if (!hides) return {begin, segment.num_queries};
  return {begin, std::min(segment.num_queries, keys.end - 1 + segment.window - earlier)};
}

LAYERSTREAM_FUNCTION constexpr std::int64_t tiles(std::int64_t extent, std::int64_t tile) {
  return (extent + tile - 1) / tile;
}

/// How many leading segments are one run; none only if there are none.
inline std::size_t leading_run(std::span<const AttentionSegment> segments) {
  std::size_t count = std::min<std::size_t>(1, segments.size());
  while (count < segments.size() && segments[count].num_queries > 0 &&
         segments[count].num_queries == segments.front().num_queries &&
         segments[count].first_query == segments.front().first_query) {
    ++count;
  }
  return count;
}

/// How many leading segments, of whole runs, share no keys, as the keys of runs ascend; at least one run if
/// there is any.
inline std::size_t leading_disjoint(std::span<const AttentionSegment> segments) {
  std::int64_t end = 0;
  std::size_t count = 0;
  while (count < segments.size()) {
    const auto run = segments.subspan(count, leading_run(segments.subspan(count)));
    std::int64_t begin = run.front().first_key, next_end = end;
    for (const AttentionSegment& range : run) {
      begin = std::min(begin, range.first_key);
      next_end = std::max(next_end, range.first_key + range.num_keys);
    }
    if (count > 0 && begin < end) break;
    end = next_end;
    count += run.size();
  }
  return count;
}

}  // namespace layerstream::ops::detail
