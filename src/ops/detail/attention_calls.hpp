#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/detail/attention_cost.hpp"

/// How a call of attention is cut into calls of a fused kernel, cuDNN's, whose plans are made for fixed
/// extents: plain host arithmetic. Each plan is built at first use and takes about a second, so extents are
/// rounded until a run needs few plans; and the deterministic backward pass keeps all gradients of scores in
/// its workspace, queries times keys, so long segments are cut into tiles.
namespace layerstream::ops::detail {

enum class AttentionMask : std::uint8_t {
  none,          ///< a query sees every key
  causal,        ///< as many queries as keys: query i sees keys up to i
  bottom_right,  ///< the last query sees every key, the one before it all but one, ...
};

/// One call of a fused kernel for a batch of entries.
struct AttentionCall {
  /// Extents of the plan. If `ragged`, an entry may be shorter than them and lie anywhere, and a batch has
  /// entries without tokens beyond those of `entries`; if not, entries have exactly these extents and follow
  /// each other without gaps.
  std::int64_t batch = 1, queries = 0, keys = 0;
  AttentionMask mask = AttentionMask::causal;
  std::int64_t window = 0;  ///< 0: none
  bool ragged = false;
  /// Forward: o and lse are a part, to be joined with what earlier calls left for the same queries.
  bool joins = false;
  /// What becomes of the gradient of the queries, which several calls in turn may contribute to.
  enum class QueryGradient : std::uint8_t { whole, first, next, last } query_gradient = QueryGradient::whole;
  /// Non-empty. Rows of keys lie at one distance from the rows of their queries, which ascend.
  std::vector<AttentionSegment> entries;

  std::int64_t first_query() const { return entries.front().first_query; }
  std::int64_t first_key() const { return entries.front().first_key; }
  /// Rows from the first entry's first to the last entry's last.
  std::int64_t query_rows() const {
    return entries.back().first_query + entries.back().num_queries - first_query();
  }
  std::int64_t key_rows() const { return entries.back().first_key + entries.back().num_keys - first_key(); }
};

/// Calls in order; together they compute attention_forward. Those that join have one entry.
std::vector<AttentionCall> attention_forward_calls(std::span<const AttentionSegment> segments);

/// Calls in order; together they compute attention_backward. Calls that contribute to one gradient of
/// queries follow each other: first, next ..., last. Their parts of dk and dv are to be added in this order.
/// @throws ResourceError if a window needs more workspace than attention_plan_bytes.
std::vector<AttentionCall> attention_backward_calls(std::span<const AttentionSegment> segments,
                                                    const AttentionCost& cost);

}  // namespace layerstream::ops::detail
