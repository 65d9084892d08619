#include "io/packing.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "data_files.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

TokenStore store_of_lengths(const std::vector<std::int64_t>& lengths) {
  TokenStore store(1000);
  store.begin_source({"shard", false, false});
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    store.begin_document(static_cast<std::int64_t>(d));
    for (std::int64_t i = 0; i < lengths[d]; ++i) store.append_token(static_cast<std::int32_t>(i % 1000));
    store.finish_document();
  }
  return store;
}

/// "0[0,3) 1[0,2)" for each row.
std::vector<std::string> describe(const PackedRows& rows) {
  std::vector<std::string> text;
  for (std::int64_t i = 0; i < rows.num_rows(); ++i) {
    std::string row;
    for (const RowPiece& piece : rows.row(i)) {
      row += fmt::format("{}{}[{},{})", row.empty() ? "" : " ", piece.document, piece.offset,
                         piece.offset + piece.length);
    }
    text.push_back(row);
  }
  return text;
}

struct Packed {
  std::vector<std::string> rows;
  DatasetReport report;
};

Packed pack(const std::vector<std::int64_t>& lengths, const PackingOptions& options) {
  Packed packed;
  packed.rows = describe(pack_rows(store_of_lengths(lengths), options, packed.report));
  return packed;
}

TEST(Packing, SplitFillsEveryRowAndContinuesInTheNext) {
  const Packed packed = pack({3, 4, 1, 9}, {5, true, Overlong::split});
  EXPECT_THAT(packed.rows, ElementsAre("0[0,3) 1[0,2)", "1[2,4) 2[0,1) 3[0,2)", "3[2,7)", "3[7,9)"));
  EXPECT_EQ(packed.report.documents_split, 2);
}

TEST(Packing, SplitKeepsDocumentsWithContextWholeIfTheyFitARow) {
  TokenStore store(1000);
  store.begin_source({"shard", false, false});
  const auto add = [&](std::int64_t number, const std::vector<bool>& mask) {
    store.begin_document(number);
    for (const bool is_target : mask) store.append_token(1, is_target);
    store.finish_document();
  };
  add(0, {true, true, true});
  add(1, {false, false, true});                         // a prompt and its answer
  add(2, {true, true, true});                           // plain text
  add(3, {false, true, true});                          // nothing predicts the first token in any case
  add(4, {true, false, true, true, true, true, true});  // longer than a row
  DatasetReport report;
  EXPECT_THAT(describe(pack_rows(store, {5, true, Overlong::split}, report)),
              ElementsAre("0[0,3)", "1[0,3) 2[0,2)", "2[2,3) 3[0,3) 4[0,1)", "4[1,6)", "4[6,7)"));
  EXPECT_EQ(report.documents_split, 2);
}

TEST(Packing, SplitOfExactFitsStraddlesNothing) {
  const Packed packed = pack({5, 2, 3, 10}, {5, true, Overlong::split});
  EXPECT_THAT(packed.rows, ElementsAre("0[0,5)", "1[0,2) 2[0,3)", "3[0,5)", "3[5,10)"));
  EXPECT_EQ(packed.report.documents_split, 1);
}

TEST(Packing, WithoutPackingEachPieceIsARow) {
  EXPECT_THAT(pack({3, 12, 5}, {5, false, Overlong::split}).rows,
              ElementsAre("0[0,3)", "1[0,5)", "1[5,10)", "1[10,12)", "2[0,5)"));
  EXPECT_THAT(pack({1, 2, 1}, {5, false, Overlong::error}).rows, ElementsAre("0[0,1)", "1[0,2)", "2[0,1)"));
}

TEST(Packing, DocumentsThatFitARowNeverStraddleUnlessSplit) {
  for (const Overlong overlong : {Overlong::truncate, Overlong::drop, Overlong::error}) {
    EXPECT_THAT(pack({3, 4, 1, 5, 2, 3}, {5, true, overlong}).rows,
                ElementsAre("0[0,3)", "1[0,4) 2[0,1)", "3[0,5)", "4[0,2) 5[0,3)"));
  }
}

TEST(Packing, TruncateCutsAtTheRowAndCountsWhatIsLost) {
  const Packed packed = pack({2, 9, 3, 6}, {5, true, Overlong::truncate});
  EXPECT_THAT(packed.rows, ElementsAre("0[0,2)", "1[0,5)", "2[0,3)", "3[0,5)"));
  EXPECT_EQ(packed.report.documents_truncated.count, 2);
  EXPECT_EQ(packed.report.tokens_truncated, 4 + 1);
  EXPECT_THAT(packed.report.documents_truncated.first,
              ElementsAre("shard: document 1: 9 tokens", "shard: document 3: 6 tokens"));
  EXPECT_THAT(packed.report.to_text(), HasSubstr("documents truncated: 2, 5 tokens lost"));
}

TEST(Packing, DropLeavesOutLongDocumentsAndCountsThem) {
  const Packed packed = pack({2, 9, 3, 6}, {5, true, Overlong::drop});
  EXPECT_THAT(packed.rows, ElementsAre("0[0,2) 2[0,3)"));
  EXPECT_EQ(packed.report.documents_dropped.count, 2);
  EXPECT_EQ(packed.report.tokens_dropped, 15);
  EXPECT_THAT(packed.report.to_text(), HasSubstr("longer than a row: 2, 15 tokens lost"));
}

TEST(Packing, ErrorNamesDocumentLengthAndRemedy) {
  EXPECT_THAT(message_of<FileError>([] {
                pack({5, 6}, {5, true, Overlong::error});
              }),
              AllOf(HasSubstr("shard: document 1"), HasSubstr("6 tokens"), HasSubstr("cutoff_len: 5"),
                    HasSubstr("overlong: split")));
}

TEST(Packing, RowOfFewerThanTwoTokensIsRefused) {
  EXPECT_THAT(message_of<ConfigError>([] {
                pack({5}, {1, true, Overlong::split});
              }),
              HasSubstr("cutoff_len: 1"));
}

TEST(Packing, SplitCoversEveryTokenOnceInOrder) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < 200; ++i) lengths.push_back(1 + (i * i * 7919) % 97);
  for (const bool packing : {true, false}) {
    DatasetReport report;
    const TokenStore store = store_of_lengths(lengths);
    const PackedRows rows = pack_rows(store, {32, packing, Overlong::split}, report);
    std::int64_t document = 0;
    std::int64_t offset = 0;
    for (std::int64_t i = 0; i < rows.num_rows(); ++i) {
      std::int64_t tokens = 0;
      for (const RowPiece& piece : rows.row(i)) {
        ASSERT_EQ(piece.document, document);
        ASSERT_EQ(piece.offset, offset);
        ASSERT_GT(piece.length, 0);
        tokens += piece.length;
        offset += piece.length;
        if (offset == lengths[static_cast<std::size_t>(document)]) {
          ++document;
          offset = 0;
        }
      }
      ASSERT_LE(tokens, 32);
      if (packing && i + 1 < rows.num_rows()) {
        ASSERT_EQ(tokens, 32);
      }
    }
    EXPECT_EQ(document, 200);
  }
}

}  // namespace
}  // namespace layerstream::io
