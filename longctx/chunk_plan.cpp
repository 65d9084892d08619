#include "longctx/chunk_plan.hpp"

#include <algorithm>

namespace layerstream {
namespace {

/// Segments of chunk [begin, end) of one row; `query_base` and `key_base` are where the row's token 0
/// would lie among the chunk's queries and the group's keys.
void append_segments(const TokenRow& row, std::int64_t begin, std::int64_t end, std::int64_t query_base,
                     std::int64_t key_base, std::vector<ops::AttentionSegment>& segments) {
  for (std::size_t d = 0; d < row.document_starts.size(); ++d) {
    const std::int64_t document_begin = row.document_starts[d];
    const std::int64_t document_end =
        d + 1 < row.document_starts.size() ? row.document_starts[d + 1] : row.num_tokens();
    const std::int64_t first = std::max(begin, document_begin);
    const std::int64_t last = std::min(end, document_end);
    if (first >= last) continue;
    segments.push_back({.first_query = query_base + first,
                        .num_queries = last - first,
                        .first_key = key_base + document_begin,
                        .num_keys = last - document_begin});
  }
}

void check(const TokenRow& row, std::size_t index) {
  LAYERSTREAM_EXPECT(row.targets.size() == row.input_ids.size() && !row.input_ids.empty(),
                     "row {} has {} tokens and {} targets", index, row.input_ids.size(), row.targets.size());
  LAYERSTREAM_EXPECT(!row.document_starts.empty() && row.document_starts.front() == 0,
                     "row {} starts no document", index);
  for (std::size_t d = 1; d < row.document_starts.size(); ++d) {
    LAYERSTREAM_EXPECT(
        row.document_starts[d] > row.document_starts[d - 1] && row.document_starts[d] < row.num_tokens(),
        "row {}: document {} starts at {}", index, d, row.document_starts[d]);
  }
}

}  // namespace

ChunkPlan make_chunk_plan(std::span<const TokenRow> rows, std::int64_t chunk_tokens) {
  LAYERSTREAM_EXPECT(chunk_tokens >= 1, "chunks of {} tokens", chunk_tokens);
  ChunkPlan plan;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const TokenRow& row = rows[r];
    check(row, r);
    const std::int64_t row_begin = plan.num_tokens();
    const std::int64_t length = row.num_tokens();

    const bool joins_chunk = !plan.chunks.empty() && plan.groups.back().num_chunks == 1 &&
                             plan.chunks.back().num_tokens + length <= chunk_tokens;
    if (!joins_chunk) {
      plan.groups.push_back({.first_token = row_begin, .first_chunk = plan.num_chunks()});
    }
    ChunkGroup& group = plan.groups.back();
    const int group_index = static_cast<int>(plan.groups.size()) - 1;
    if (joins_chunk) {
      Chunk& chunk = plan.chunks.back();
      append_segments(row, 0, length, chunk.num_tokens, chunk.num_tokens, chunk.segments);
      chunk.num_tokens += length;
    } else {
      for (std::int64_t begin = 0; begin < length; begin += chunk_tokens) {
        const std::int64_t end = std::min(length, begin + chunk_tokens);
        Chunk chunk{.first_token = row_begin + begin,
                    .num_tokens = end - begin,
                    .group = group_index,
                    .offset_in_group = begin,
                    .segments = {}};
        append_segments(row, begin, end, -begin, 0, chunk.segments);
        plan.chunks.push_back(std::move(chunk));
        ++group.num_chunks;
      }
    }
    group.num_tokens += length;

    plan.input_ids.insert(plan.input_ids.end(), row.input_ids.begin(), row.input_ids.end());
    plan.targets.insert(plan.targets.end(), row.targets.begin(), row.targets.end());
    for (std::size_t d = 0; d < row.document_starts.size(); ++d) {
      const std::int64_t end = d + 1 < row.document_starts.size() ? row.document_starts[d + 1] : length;
      const std::int64_t document_length = end - row.document_starts[d];
      for (std::int64_t p = 0; p < document_length; ++p)
        plan.positions.push_back(static_cast<std::int32_t>(p));
      plan.max_position = std::max(plan.max_position, document_length);
    }
    plan.num_targets += row.num_targets();
  }
  return plan;
}

ChunkBounds chunk_bounds(std::int64_t max_rows, std::int64_t max_row_tokens, std::int64_t chunk_tokens) {
  ChunkBounds bounds;
  bounds.tokens = max_rows * max_row_tokens;
  bounds.chunk_tokens = std::min(chunk_tokens, bounds.tokens);
  bounds.group_tokens = std::max(bounds.chunk_tokens, max_row_tokens);
  bounds.row_tokens = max_row_tokens;
  return bounds;
}

}  // namespace layerstream
