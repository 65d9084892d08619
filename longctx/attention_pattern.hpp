#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/attention_pattern.hpp"
#include "ops/attention.hpp"

namespace layerstream {

/// The same queries with the keys that the pattern leaves of those in `segments`, each of which is
/// bottom-right causal over a document from its first key on and stands alone (as in Chunk). The number of
/// segments does not grow with a window; blocks make up to two of each block of queries.
std::vector<ops::AttentionSegment> apply_pattern(const AttentionPattern& pattern,
                                                 std::span<const ops::AttentionSegment> segments);

/// Pairs of a query and a key that the pattern leaves.
std::int64_t visible_pairs(const AttentionPattern& pattern, std::span<const ops::AttentionSegment> segments);

}  // namespace layerstream
