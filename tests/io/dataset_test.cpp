#include "io/dataset.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "data_files.hpp"
#include "io/byte_tokenizer.hpp"
#include "io/sampler.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using testing::DataDirectory;
using testing::document_offsets;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::input_ids;
using testing::message_of;
using testing::safetensors_bytes;
using testing::ShardTensor;
using testing::target_mask;

constexpr std::int32_t end_of_document = ByteTokenizer::end_of_document;

class DatasetTest : public ::testing::Test {
 protected:
  std::string shard(const std::vector<ShardTensor>& tensors, const std::string& name = "s.safetensors") {
    return data_.write(name, safetensors_bytes(tensors));
  }
  static DatasetOptions options(const std::vector<std::string>& inputs, std::int64_t cutoff_len) {
    return {.inputs = inputs, .vocab_size = ByteTokenizer::vocab_size, .cutoff_len = cutoff_len};
  }

  DataDirectory data_;
};

TEST_F(DatasetTest, RowsHoldDocumentsOneAfterAnotherWithTheirStartsAndTargets) {
  const Dataset dataset = Dataset::load(options({data_.write("a", "ab"), data_.write("b", "cde")}, 16));
  ASSERT_EQ(dataset.num_rows(), 1);
  const TokenRow row = dataset.row(0);
  EXPECT_THAT(row.input_ids, ElementsAre('a', 'b', end_of_document, 'c', 'd', 'e', end_of_document));
  EXPECT_THAT(row.targets, ElementsAre('b', end_of_document, -100, 'd', 'e', end_of_document, -100));
  EXPECT_THAT(row.document_starts, ElementsAre(0, 3));
  EXPECT_EQ(dataset.num_tokens(), 7);
  EXPECT_EQ(dataset.row_targets(0), row.num_targets());
  EXPECT_EQ(dataset.row_place(0), data_.path("a") + " to " + data_.path("b"));
}

TEST_F(DatasetTest, SplitPieceStartsAfreshAndItsLastTokenHasNoTarget) {
  const Dataset dataset = Dataset::load(options({data_.write("a", "ab"), data_.write("b", "cdefgh")}, 5));
  ASSERT_EQ(dataset.num_rows(), 2);
  const TokenRow first = dataset.row(0);
  EXPECT_THAT(first.input_ids, ElementsAre('a', 'b', end_of_document, 'c', 'd'));
  EXPECT_THAT(first.targets, ElementsAre('b', end_of_document, -100, 'd', -100));
  EXPECT_THAT(first.document_starts, ElementsAre(0, 3));
  const TokenRow second = dataset.row(1);
  EXPECT_THAT(second.input_ids, ElementsAre('e', 'f', 'g', 'h', end_of_document));
  EXPECT_THAT(second.targets, ElementsAre('f', 'g', 'h', end_of_document, -100));
  EXPECT_THAT(second.document_starts, ElementsAre(0));
  EXPECT_EQ(dataset.row_place(1), data_.path("b") + ": tokens 2 to 6");
}

TEST_F(DatasetTest, SplitConservesEveryTokenAndLosesOneTargetPerPiece) {
  std::string all;
  for (int f = 0; f < 40; ++f) {
    int length = 2 + f * f % 71;
    length += length % 17 == 0 ? 1 : 0;  // no rest of one token, which would be a row without a target
    std::string text;
    for (int i = 0; i < length; ++i) text.push_back(static_cast<char>('a' + (f * 7 + i) % 26));
    data_.write(fmt::format("d/{:02}", f), text);
    all += text + "\n";  // stands for the end of the document
  }
  for (const bool packing : {true, false}) {
    DatasetOptions split = options({data_.path("d")}, 17);
    split.packing = packing;
    const Dataset dataset = Dataset::load(split);
    std::string seen;
    std::int64_t targets = 0;
    std::int64_t pieces = 0;
    for (std::int64_t i = 0; i < dataset.num_rows(); ++i) {
      const TokenRow row = dataset.row(i);
      ASSERT_EQ(row.targets.size(), row.input_ids.size());
      ASSERT_EQ(row.document_starts.front(), 0);
      ASSERT_TRUE(std::is_sorted(row.document_starts.begin(), row.document_starts.end()));
      ASSERT_EQ(row.num_targets(), dataset.row_targets(i));
      ASSERT_EQ(row.num_tokens(), dataset.row_tokens(i));
      for (const std::int32_t id : row.input_ids)
        seen += id == end_of_document ? '\n' : static_cast<char>(id);
      targets += row.num_targets();
      pieces += static_cast<std::int64_t>(row.document_starts.size());
    }
    ASSERT_EQ(dataset.report().rows_without_targets.count, 0);
    EXPECT_EQ(seen, all);
    EXPECT_EQ(targets, static_cast<std::int64_t>(all.size()) - pieces);
    EXPECT_EQ(dataset.report().targets, targets);
    EXPECT_EQ(dataset.report().pieces, pieces);
    EXPECT_EQ(dataset.report().tokens, static_cast<std::int64_t>(all.size()));
    EXPECT_EQ(dataset.report().documents, 40);
  }
}

TEST_F(DatasetTest, OnlyMaskedInTokensAreTargets) {
  const Dataset dataset =
      Dataset::load(options({shard({input_ids({10, 11, 12, 13, 20, 21, 22}),
                                    target_mask({1, 0, 1, 1, 1, 1, 0}), document_offsets({0, 4, 7})})},
                            16));
  const TokenRow row = dataset.row(0);
  // The mask of a document's first token has no one to predict it.
  EXPECT_THAT(row.targets, ElementsAre(-100, 12, 13, -100, 21, -100, -100));
  EXPECT_THAT(row.document_starts, ElementsAre(0, 4));
  EXPECT_EQ(dataset.row_targets(0), 3);
}

TEST_F(DatasetTest, TextBesideAMaskedShardIsAllTargets) {
  const std::string masked = shard({input_ids({1, 2, 3}), target_mask({0, 0, 1})});
  const Dataset dataset =
      Dataset::load(options({data_.write("a", "ab"), masked, data_.write("b", "cd")}, 16));
  EXPECT_THAT(dataset.row(0).targets,
              ElementsAre('b', end_of_document, -100, -100, 3, -100, 'd', end_of_document, -100));
}

TEST_F(DatasetTest, RowsWithoutTargetsAreDroppedCountedAndPlaced) {
  DatasetOptions unpacked =
      options({shard({input_ids({1, 2, 3, 4, 5, 6, 7, 8}), document_offsets({0, 2, 4, 5, 8}),
                      target_mask({1, 1, 1, 0, 1, 0, 0, 1})})},
              16);
  unpacked.packing = false;
  const Dataset dataset = Dataset::load(unpacked);
  ASSERT_EQ(dataset.num_rows(), 2);
  EXPECT_THAT(dataset.row(0).input_ids, ElementsAre(1, 2));
  EXPECT_THAT(dataset.row(1).input_ids, ElementsAre(6, 7, 8));
  const std::string path = data_.path("s.safetensors");
  EXPECT_EQ(dataset.report().rows_without_targets.count, 2);
  EXPECT_THAT(dataset.report().rows_without_targets.first,
              ElementsAre(path + ": document 1", path + ": document 2"));
  EXPECT_THAT(dataset.report().to_text(), AllOf(HasSubstr("no target: 2"), HasSubstr(path + ": document 1")));
  EXPECT_EQ(dataset.num_tokens(), 5);
}

TEST_F(DatasetTest, MaskedOutPartOfASplitDocumentIsPlacedByItsTokens) {
  const Dataset dataset =
      Dataset::load(options({shard({input_ids({1, 2, 3, 4, 5, 6}), target_mask({1, 1, 1, 1, 0, 0})})}, 3));
  EXPECT_EQ(dataset.num_rows(), 1);
  EXPECT_THAT(dataset.report().rows_without_targets.first,
              ElementsAre(data_.path("s.safetensors") + ": tokens 3 to 5"));
}

TEST_F(DatasetTest, RestOfOneTokenIsARowWithoutATarget) {
  const std::string path = data_.write("a", "abcd");
  const Dataset dataset = Dataset::load(options({path}, 4));
  EXPECT_EQ(dataset.num_rows(), 1);
  EXPECT_THAT(dataset.report().rows_without_targets.first, ElementsAre(path + ": tokens 4 to 4"));
}

TEST_F(DatasetTest, NothingToTrainOnIsRefusedWithTheReport) {
  const std::string path = shard({input_ids({1, 2, 3}), target_mask({1, 0, 0})});
  EXPECT_THAT(message_of<FileError>([&] { Dataset::load(options({path}, 8)); }),
              AllOf(HasSubstr("no row"), HasSubstr("no target: 1"), HasSubstr(path)));
  EXPECT_THAT(message_of<FileError>([&] { Dataset::load(options({data_.write("empty", "")}, 8)); }),
              HasSubstr("empty files skipped: 1"));
}

TEST_F(DatasetTest, TextNeedsAVocabularyOfBytes) {
  DatasetOptions small = options({data_.write("a", "abc")}, 8);
  small.vocab_size = 256;
  EXPECT_THAT(message_of<ConfigError>([&] { Dataset::load(small); }),
              AllOf(HasSubstr("257"), HasSubstr("256")));
  small.vocab_size = 0;
  EXPECT_THAT(message_of<ConfigError>([&] { Dataset::load(small); }), HasSubstr("vocab_size"));
}

TEST_F(DatasetTest, OptionsComeFromTheRunsKeys) {
  RunConfig config;
  config.train_file = {"x"};
  config.cutoff_len = 77;
  config.packing = false;
  config.overlong = Overlong::drop;
  config.on_bad_line = OnBadLine::skip;
  const DatasetOptions taken = dataset_options(config, 300);
  EXPECT_THAT(taken.inputs, ElementsAre("x"));
  EXPECT_EQ(taken.vocab_size, 300);
  EXPECT_EQ(taken.cutoff_len, 77);
  EXPECT_FALSE(taken.packing);
  EXPECT_EQ(taken.overlong, Overlong::drop);
  EXPECT_EQ(taken.on_bad_line, OnBadLine::skip);
}

TEST_F(DatasetTest, ContentHashChangesWithAnyTokenMaskOrBoundaryAndWithNothingElse) {
  const std::vector<std::int64_t> ids{1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<std::int64_t> mask{0, 1, 0, 1, 1, 1, 0, 1};
  const auto hash = [&](const std::vector<std::int64_t>& i, const std::vector<std::int64_t>& m,
                        const std::vector<std::int64_t>& offsets, std::int64_t cutoff_len,
                        std::int64_t vocab_size, const std::string& name) {
    DatasetOptions these =
        options({shard({input_ids(i), target_mask(m), document_offsets(offsets)}, name)}, cutoff_len);
    these.vocab_size = vocab_size;
    return Dataset::load(these).content_hash();
  };
  const std::uint64_t reference = hash(ids, mask, {0, 4, 8}, 16, 257, "a.safetensors");
  EXPECT_EQ(hash(ids, mask, {0, 4, 8}, 16, 100'000, "b.safetensors"), reference);  // other name, other width
  for (std::size_t k = 0; k < ids.size(); ++k) {
    std::vector<std::int64_t> changed = ids;
    changed[k] += 100;
    EXPECT_NE(hash(changed, mask, {0, 4, 8}, 16, 257, "a.safetensors"), reference) << k;
    if (k == 0 || k == 4) continue;  // first tokens of documents are no one's target
    changed = mask;
    changed[k] = 1 - changed[k];
    EXPECT_NE(hash(ids, changed, {0, 4, 8}, 16, 257, "a.safetensors"), reference) << k;
  }
  EXPECT_NE(hash(ids, mask, {0, 3, 8}, 16, 257, "a.safetensors"), reference);
  EXPECT_NE(hash(ids, mask, {0, 4, 8}, 4, 257, "a.safetensors"), reference);
  // Tokens and targets equal, only the boundary moves.
  const std::vector<std::int64_t> flat{0, 1, 0, 0, 0, 1, 0, 1};
  EXPECT_NE(hash(ids, flat, {0, 3, 8}, 16, 257, "a.safetensors"),
            hash(ids, flat, {0, 4, 8}, 16, 257, "a.safetensors"));
}

TEST_F(DatasetTest, StepsOfAnEpochDivideTheirTargetsExactly) {
  DatasetOptions unpacked = options({data_.root()}, 64);
  unpacked.packing = false;
  for (int i = 0; i < 7; ++i)
    data_.write(fmt::format("{}.txt", i), std::string(static_cast<std::size_t>(3 + 5 * i), 'x'));
  const Dataset dataset = Dataset::load(unpacked);
  DataOrder order(dataset.num_rows(), 4, 42);
  ASSERT_EQ(order.steps_per_epoch(), 2);
  const std::int64_t first = dataset.count_targets(order.step(0).rows);
  const std::int64_t second = dataset.count_targets(order.step(1).rows);
  EXPECT_EQ(first + second, 7 * 3 + 5 * 21);  // a target per byte: all but the first, and the end
  std::int64_t built = 0;
  for (const std::int64_t row : order.step(1).rows) built += dataset.row(row).num_targets();
  EXPECT_EQ(second, built);
}

TEST_F(DatasetTest, StoredInTwoBytesPerTokenWhereTheVocabularyAllowsIt) {
  const std::string text(100'000, 'x');
  DatasetOptions narrow = options({data_.write("a", text)}, 2048);
  const Dataset small = Dataset::load(narrow);
  narrow.vocab_size = 65'537;
  const Dataset large = Dataset::load(narrow);
  // Tokens, plus 24 B per piece and 8 B per row of 49 rows, plus one document.
  EXPECT_LE(small.bytes(), 2u * 100'001 + 49 * 32 + 64);
  EXPECT_GE(large.bytes(), 4u * 100'001);
  EXPECT_LE(large.bytes(), 4u * 100'001 + 49 * 32 + 64);
  EXPECT_EQ(small.row(48).input_ids, large.row(48).input_ids);
}

TEST_F(DatasetTest, ReadingTellsHowFarItIsAndCanBeStoppedAnywhere) {
  DatasetOptions wanted = options({data_.write("a.txt", std::string(1000, 'a')), data_.write("b.txt", "b"),
                                   data_.write("c.safetensors", safetensors_bytes({input_ids({1, 2, 3})}))},
                                  300);
  std::vector<std::int64_t> done;
  std::int64_t total_bytes = 0;
  wanted.between_pieces = [&](std::int64_t bytes, std::int64_t total) {
    done.push_back(bytes);
    total_bytes = total;
    EXPECT_LE(bytes, total);
  };
  Dataset::load(wanted);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_GT(total_bytes, 1001);
  ASSERT_GT(done.size(), 5u);
  for (std::size_t stop_at = 0; stop_at < done.size(); ++stop_at) {
    std::size_t calls = 0;
    wanted.between_pieces = [&](std::int64_t, std::int64_t) {
      if (calls++ == stop_at) throw Error("stop here");
    };
    EXPECT_EQ(message_of<Error>([&] { Dataset::load(wanted); }), "stop here");
  }
}

TEST_F(DatasetTest, TextLargerThanAPieceIsReadWholeAndItsFaultsAreCountedFromTheFilesStart) {
  // A piece is 64 MiB; its end falls into a line of two-byte characters.
  std::string line(99, '\0');
  for (std::size_t i = 0; i < 98; i += 2) line.replace(i, 2, "\xc3\xa9");
  line.back() = '\n';
  std::string text;
  constexpr std::size_t lines = (std::size_t{65} << 20) / 99;
  text.reserve(lines * 99);
  for (std::size_t i = 0; i < lines; ++i) text += line;
  const std::size_t bytes = text.size();
  const std::string path = data_.write("large.txt", text);
  DatasetOptions wanted = options({path}, 300);
  wanted.cutoff_len = 1 << 20;
  EXPECT_EQ(Dataset::load(wanted).num_tokens(), static_cast<std::int64_t>(bytes) + 1);
  text[bytes - 97] = '\xff';
  data_.write("large.txt", text);
  EXPECT_THAT(message_of<FileError>([&] { Dataset::load(wanted); }),
              HasSubstr(fmt::format("{}:{}:3: not UTF-8", path, lines)));
}

TEST(LengthPercentiles, AreNearestRank) {
  const auto check = [](const std::vector<std::int64_t>& lengths, const std::vector<std::int64_t>& expected) {
    const LengthPercentiles p = length_percentiles(lengths);
    EXPECT_EQ((std::vector<std::int64_t>{p.p0, p.p50, p.p90, p.p99, p.max}), expected);
  };
  std::vector<std::int64_t> hundred;
  for (std::int64_t i = 100; i >= 1; --i) hundred.push_back(i);
  check(hundred, {1, 50, 90, 99, 100});
  hundred.push_back(1000);
  check(hundred, {1, 51, 91, 100, 1000});
  check({5}, {5, 5, 5, 5, 5});
  check({9, 3}, {3, 3, 9, 9, 9});
  check({}, {0, 0, 0, 0, 0});
}

TEST_F(DatasetTest, ReportCountsDocumentLengthsBeforeCutting) {
  DatasetOptions cut =
      options({data_.write("a", std::string(9, 'a')), data_.write("b", std::string(99, 'b'))}, 20);
  cut.overlong = Overlong::truncate;
  const Dataset dataset = Dataset::load(cut);
  EXPECT_EQ(dataset.report().document_lengths.p50, 10);
  EXPECT_EQ(dataset.report().document_lengths.max, 100);
  EXPECT_EQ(dataset.report().document_tokens, 110);
  EXPECT_EQ(dataset.report().tokens, 30);
  EXPECT_EQ(dataset.report().tokens_truncated, 80);
  EXPECT_THAT(dataset.report().to_text(),
              AllOf(HasSubstr("min 10, p50 10, p90 100, p99 100, max 100"), HasSubstr("80 tokens lost"),
                    HasSubstr("rows: 2 of up to 20 tokens, 75.0% full: 30 tokens, 28 targets, 2 pieces")));
}

TEST_F(DatasetTest, ReportTellsTheEntropyOfTargetFrequencies) {
  // Targets: b, b, a, end of document: frequencies 1/2, 1/4, 1/4.
  const Dataset dataset = Dataset::load(options({data_.write("a", "xbba")}, 8));
  EXPECT_NEAR(dataset.report().unigram_entropy, 1.5 * std::log(2.0), 1e-14);
  // A row of "aaaa"; the end of the document begins a row of its own, which has no target.
  EXPECT_EQ(Dataset::load(options({data_.write("b", "aaaa")}, 4)).report().unigram_entropy, 0.0);
}

TEST_F(DatasetTest, RowOutOfRangeIsAContractError) {
  const Dataset dataset = Dataset::load(options({data_.write("a", "abc")}, 8));
  EXPECT_THROW(dataset.row(1), ContractError);
  EXPECT_THROW(dataset.row(-1), ContractError);
}

}  // namespace
}  // namespace layerstream::io
