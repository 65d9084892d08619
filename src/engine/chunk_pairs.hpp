#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/attention_pattern.hpp"
#include "longctx/attention_pattern.hpp"
#include "longctx/chunk_plan.hpp"

namespace layerstream {

/// Pairs of a query and a visible key by block and chunk, counted once for all blocks of the same pattern: a
/// long row's pattern can have thousands of segments.
class ChunkPairs {
 public:
  /// @param patterns by block
  ChunkPairs(const ChunkPlan& chunks, const std::vector<AttentionPattern>& patterns) {
    for (const AttentionPattern& pattern : patterns) {
      const auto known = std::ranges::find(counted_, pattern, &Counted::pattern);
      counted_of_block_.push_back(static_cast<std::size_t>(known - counted_.begin()));
      if (known != counted_.end()) continue;
      Counted counted{.pattern = pattern, .by_chunk = {}};
      for (const Chunk& chunk : chunks.chunks) {
        counted.by_chunk.push_back(visible_pairs(pattern, chunk.segments));
      }
      counted_.push_back(std::move(counted));
    }
  }

  std::int64_t of(int block, int chunk) const {
    return counted_[counted_of_block_[static_cast<std::size_t>(block)]]
        .by_chunk[static_cast<std::size_t>(chunk)];
  }

 private:
  struct Counted {
    AttentionPattern pattern;
    std::vector<std::int64_t> by_chunk;
  };
  std::vector<Counted> counted_;
  std::vector<std::size_t> counted_of_block_;
};

}  // namespace layerstream
