#pragma once

#include <cstdint>

namespace layerstream {

enum class AttentionPatternType : std::uint8_t { full, window, blocks };

/// A mask for a document whose tokens are counted from its start. Query i sees key j <= i if
///   full:   always;
///   window: i - j < window, or j < global_tokens;
///   blocks: floor(j / block) > floor(i / block) - local_blocks, or j < global_tokens.
/// So a query's keys are two ranges: the document's first tokens, and local ones up to its own.
struct AttentionPattern {
  AttentionPatternType type = AttentionPatternType::full;
  std::int64_t window = 0;         ///< keys, the query's own included
  std::int64_t block = 0;          ///< tokens
  std::int64_t local_blocks = 0;   ///< the query's own and those right before it
  std::int64_t global_tokens = 0;  ///< also called attention sinks

  friend bool operator==(const AttentionPattern&, const AttentionPattern&) = default;

  /// Whether there may be a gap between a query's two ranges.
  bool has_several_ranges() const { return type != AttentionPatternType::full && global_tokens > 0; }

  /// How many of a document's tokens see every key before them. @pre type is not full
  std::int64_t dense_tokens() const {
    if (type == AttentionPatternType::window) return global_tokens + window;
    return (local_blocks + global_tokens / block) * block;
  }
};

}  // namespace layerstream
