// How the rows of a step are cut into chunks, and what of a row cannot be.

#include "longctx/chunk_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/message_of.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TokenRow row_of(std::int64_t tokens, std::vector<std::int64_t> document_starts) {
  return {.input_ids = std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 0),
          .targets = std::vector<std::int32_t>(static_cast<std::size_t>(tokens), -100),
          .document_starts = std::move(document_starts)};
}

/// "queries [first, end) see keys [first, end)" of each segment of each chunk.
std::vector<std::string> segments_of(const std::vector<TokenRow>& rows, std::int64_t chunk_tokens) {
  std::vector<std::string> all;
  for (const Chunk& chunk : make_chunk_plan(rows, chunk_tokens).chunks) {
    std::string text = fmt::format("{}+{}:", chunk.first_token, chunk.num_tokens);
    for (const ops::AttentionSegment& s : chunk.segments) {
      text += fmt::format(" {}-{} see {}-{}", s.first_query, s.first_query + s.num_queries, s.first_key,
                          s.first_key + s.num_keys);
    }
    all.push_back(std::move(text));
  }
  return all;
}

TEST(ChunkPlan, ALongRowIsCutAtAnyMultipleAndItsChunksSeeTheKeysOfTheirDocumentSoFar) {
  // Documents of 3, 9 and 5 tokens.
  EXPECT_THAT(segments_of({row_of(17, {0, 3, 12})}, 5),
              ElementsAre("0+5: 0-3 see 0-3 3-5 see 3-5", "5+5: 0-5 see 3-10",
                          "10+5: 0-2 see 3-12 2-5 see 12-15", "15+2: 0-2 see 12-17"));
  EXPECT_THAT(segments_of({row_of(17, {0, 3, 12})}, 17),
              ElementsAre("0+17: 0-3 see 0-3 3-12 see 3-12 12-17 see 12-17"));
}

TEST(ChunkPlan, RowsShareAChunkAsLongAsTheyFitWhole) {
  EXPECT_THAT(segments_of({row_of(4, {0}), row_of(3, {0, 1}), row_of(2, {0})}, 7),
              ElementsAre("0+7: 0-4 see 0-4 4-5 see 4-5 5-7 see 5-7", "7+2: 0-2 see 0-2"));
}

TEST(ChunkPlan, PositionsAndTheLongestOneCountFromTheDocumentsStart) {
  const ChunkPlan plan = make_chunk_plan(std::vector{row_of(6, {0, 4}), row_of(3, {0})}, 2);
  EXPECT_THAT(plan.positions, ElementsAre(0, 1, 2, 3, 0, 1, 0, 1, 2));
  EXPECT_EQ(plan.max_position, 4);
}

TEST(ChunkPlan, EmptyRowsAndDocumentsAndChunksOfNothingBreakTheContract) {
  const auto refused = [](const TokenRow& row, std::int64_t chunk_tokens = 8) {
    return message_of<ContractError>([&] {
      make_chunk_plan(std::vector{row_of(5, {0}), row}, chunk_tokens);
    });
  };
  EXPECT_THAT(refused(row_of(0, {0})), HasSubstr("row 1 has 0 tokens"));
  EXPECT_THAT(refused(row_of(9, {})), HasSubstr("row 1 starts no document"));
  EXPECT_THAT(refused(row_of(9, {2})), HasSubstr("row 1 starts no document"));
  EXPECT_THAT(refused(row_of(9, {0, 4, 4})), HasSubstr("row 1: document 2 starts at 4"));  // an empty one
  EXPECT_THAT(refused(row_of(9, {0, 9})), HasSubstr("row 1: document 1 starts at 9"));  // an empty last one
  EXPECT_THAT(refused(row_of(9, {0, 5, 3})), HasSubstr("row 1: document 2 starts at 3"));
  EXPECT_THAT(refused(row_of(9, {0}), 0), HasSubstr("chunks of 0 tokens"));
  TokenRow short_of_a_target = row_of(9, {0});
  short_of_a_target.targets.pop_back();
  EXPECT_THAT(refused(short_of_a_target), AllOf(HasSubstr("row 1 has 9 tokens"), HasSubstr("8 targets")));
}

}  // namespace
}  // namespace layerstream::test
