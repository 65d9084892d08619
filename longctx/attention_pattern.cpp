#include "longctx/attention_pattern.hpp"

#include <algorithm>
#include <utility>

namespace layerstream {
namespace {

using ops::AttentionSegment;

/// Segments of documents. Those whose queries see all keys share none of them, and so do, under a window,
/// the other ones: kept apart, either go through a kernel together.
struct PatternSegments {
  std::vector<AttentionSegment> dense, sparse;
};

/// Appends the segments of one document, whose queries are its tokens [begin, end).
class Document {
 public:
  Document(const AttentionPattern& pattern, const AttentionSegment& segment, PatternSegments& segments)
      : pattern_(pattern),
        begin_(segment.num_keys - segment.num_queries),
        end_(segment.num_keys),
        first_query_(segment.first_query - begin_),
        first_key_(segment.first_key),
        segments_(segments) {}

  void append() {
    const std::int64_t dense = std::clamp(dense_end(), begin_, end_);
    if (dense > begin_ || begin_ == end_) segments_.dense.push_back(local(begin_, dense, 0));
    if (dense == end_) return;
    if (pattern_.type == AttentionPatternType::window) {
      append_global(dense, end_);
      AttentionSegment segment = local(dense, end_, pattern_.global_tokens);
      segment.window = pattern_.window;
      segments_.sparse.push_back(segment);
      return;
    }
    for (std::int64_t query = dense; query < end_;) {
      const std::int64_t block = query / pattern_.block;
      const std::int64_t next = std::min(end_, (block + 1) * pattern_.block);
      append_global(query, next);
      segments_.sparse.push_back(local(query, next, (block - pattern_.local_blocks + 1) * pattern_.block));
      query = next;
    }
  }

 private:
  /// Tokens up to here make one causal segment. A window alone is one segment from its first token on.
  std::int64_t dense_end() const {
    if (pattern_.type == AttentionPatternType::full) return end_;
    const bool is_window_alone = pattern_.type == AttentionPatternType::window && pattern_.global_tokens == 0;
    return is_window_alone ? 0 : pattern_.dense_tokens();
  }

  void append_global(std::int64_t begin, std::int64_t end) {
    if (pattern_.global_tokens == 0) return;
    segments_.sparse.push_back({.first_query = first_query_ + begin,
                                .num_queries = end - begin,
                                .first_key = first_key_,
                                .num_keys = pattern_.global_tokens,
                                .causal = false});
  }

  /// Queries [begin, end) and the keys from `key` up to them.
  AttentionSegment local(std::int64_t begin, std::int64_t end, std::int64_t key) const {
    return {.first_query = first_query_ + begin,
            .num_queries = end - begin,
            .first_key = first_key_ + key,
            .num_keys = end - key};
  }

  const AttentionPattern& pattern_;
  std::int64_t begin_, end_;
  std::int64_t first_query_, first_key_;  // rows of the document's first token
  PatternSegments& segments_;
};

void check(const AttentionPattern& pattern) {
  const bool windowed = pattern.type == AttentionPatternType::window;
  const bool blocked = pattern.type == AttentionPatternType::blocks;
  LAYERSTREAM_EXPECT(pattern.global_tokens >= 0 && (!windowed || pattern.window > 0) &&
                         (!blocked || (pattern.block > 0 && pattern.local_blocks > 0)),
                     "an attention pattern with a window of {}, {} blocks of {} and {} global tokens",
                     pattern.window, pattern.local_blocks, pattern.block, pattern.global_tokens);
}

}  // namespace

std::vector<AttentionSegment> apply_pattern(const AttentionPattern& pattern,
                                            std::span<const AttentionSegment> segments) {
  check(pattern);
  PatternSegments result;
  for (const AttentionSegment& segment : segments) {
    LAYERSTREAM_EXPECT(segment.causal && segment.window == 0, "an attention pattern over a masked segment");
    Document(pattern, segment, result).append();
  }
  result.dense.insert(result.dense.end(), result.sparse.begin(), result.sparse.end());
  return std::move(result.dense);
}

std::int64_t visible_pairs(const AttentionPattern& pattern, std::span<const AttentionSegment> segments) {
  return ops::visible_pairs(apply_pattern(pattern, segments));
}

}  // namespace layerstream
