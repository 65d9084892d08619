#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/token_row.hpp"
#include "ops/attention.hpp"

namespace layerstream {

/// Tokens whose keys and values share one buffer: either several whole rows that form one chunk, or one
/// long row in several chunks.
struct ChunkGroup {
  std::int64_t first_token = 0;  ///< in the step's token stream
  std::int64_t num_tokens = 0;
  int first_chunk = 0;
  int num_chunks = 0;
};

/// A run of tokens that goes through a block at once.
struct Chunk {
  std::int64_t first_token = 0;
  std::int64_t num_tokens = 0;
  int group = 0;
  /// Tokens of the group that come before this chunk: its first row in the key and value buffers.
  std::int64_t offset_in_group = 0;
  /// Queries counted from the chunk's first token, keys from the group's first token.
  std::vector<ops::AttentionSegment> segments;
};

/// The tokens of one optimizer step, in the order in which they are visited. How rows were divided into
/// micro-batches leaves no trace here, so it cannot change a result.
struct ChunkPlan {
  std::vector<std::int32_t> input_ids;  ///< (T)
  std::vector<std::int32_t> targets;    ///< (T), −100 where there is none
  std::vector<std::int32_t> positions;  ///< (T), counted from the document's start
  std::vector<Chunk> chunks;
  std::vector<ChunkGroup> groups;
  std::int64_t num_targets = 0;
  /// Length of the longest document: what the rope tables must cover.
  std::int64_t max_position = 0;

  std::int64_t num_tokens() const { return static_cast<std::int64_t>(input_ids.size()); }
  int num_chunks() const { return static_cast<int>(chunks.size()); }
  const ChunkGroup& group_of(int chunk) const {
    return groups[static_cast<std::size_t>(chunks[static_cast<std::size_t>(chunk)].group)];
  }
};

/// Rows go into chunks in order: whole rows together while they fit into `chunk_tokens`, a longer row
/// alone and cut every `chunk_tokens`.
ChunkPlan make_chunk_plan(std::span<const TokenRow> rows, std::int64_t chunk_tokens);

/// Upper bounds over all plans of at most `max_rows` rows of at most `max_row_tokens`.
struct ChunkBounds {
  std::int64_t tokens = 0;        ///< of a step
  std::int64_t chunk_tokens = 0;  ///< of a chunk
  std::int64_t group_tokens = 0;  ///< of a group
  std::int64_t row_tokens = 0;    ///< of a row
};
ChunkBounds chunk_bounds(std::int64_t max_rows, std::int64_t max_row_tokens, std::int64_t chunk_tokens);

}  // namespace layerstream
