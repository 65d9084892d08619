#include "io/token_shard.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "data_files.hpp"
#include "io/input_files.hpp"

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
using testing::shard_tensor;
using testing::ShardTensor;
using testing::target_mask;

struct ReadResult {
  TokenStore store;
  DatasetReport report;

  std::vector<std::int32_t> ids() const {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(store.num_tokens()));
    store.copy_tokens(0, ids);
    return ids;
  }
};

ReadResult read(const std::string& path, std::int64_t vocab_size = 1000,
                OnBadLine on_bad_line = OnBadLine::error) {
  ReadResult result{TokenStore(vocab_size), {}};
  for (const InputFile& file : find_input_files({path}, result.report)) {
    EXPECT_TRUE(file.is_shard);
    read_token_shard(file, on_bad_line, result.store, result.report);
  }
  return result;
}

class TokenShardTest : public ::testing::Test {
 protected:
  ReadResult read_tensors(const std::vector<ShardTensor>& tensors, std::int64_t vocab_size = 1000,
                          OnBadLine on_bad_line = OnBadLine::error) {
    return read(data_.write("s.safetensors", safetensors_bytes(tensors)), vocab_size, on_bad_line);
  }
  /// The message, which must name the file.
  std::string refusal(const std::vector<ShardTensor>& tensors, std::int64_t vocab_size = 1000,
                      OnBadLine on_bad_line = OnBadLine::error) {
    const std::string message =
        message_of<FileError>([&] { read_tensors(tensors, vocab_size, on_bad_line); });
    EXPECT_THAT(message, HasSubstr(data_.path("s.safetensors")));
    return message;
  }

  DataDirectory data_;
};

TEST_F(TokenShardTest, AllIntegerTypesReadTheSameTokens) {
  const std::vector<std::int64_t> values{0, 1, 999, 500, 7, 65535};
  const std::vector<ShardTensor> tensors{shard_tensor<std::uint16_t>("input_ids", "U16", values),
                                         shard_tensor<std::int32_t>("input_ids", "I32", values),
                                         shard_tensor<std::uint32_t>("input_ids", "U32", values),
                                         shard_tensor<std::int64_t>("input_ids", "I64", values)};
  for (const std::int64_t vocab_size : {65536, 65537}) {  // stored in two bytes, in four
    for (const ShardTensor& tensor : tensors) {
      const ReadResult result = read_tensors({tensor}, vocab_size);
      EXPECT_THAT(result.ids(), ElementsAre(0, 1, 999, 500, 7, 65535)) << tensor.dtype;
      ASSERT_EQ(result.store.documents().size(), 1u);
      EXPECT_EQ(result.store.place(result.store.documents()[0]), data_.path("s.safetensors"));
      EXPECT_EQ(result.store.count_targets(0, 6), 6);
      EXPECT_EQ(result.report.token_shards, 1);
    }
  }
}

TEST_F(TokenShardTest, OffsetsCutDocumentsAndEmptyOnesAreCounted) {
  const ReadResult result = read_tensors({input_ids({10, 11, 12, 13, 14}), document_offsets({0, 2, 2, 5})});
  ASSERT_EQ(result.store.documents().size(), 2u);
  EXPECT_EQ(result.store.documents()[0].length, 2);
  EXPECT_EQ(result.store.documents()[1].begin, 2);
  EXPECT_EQ(result.store.documents()[1].length, 3);
  EXPECT_EQ(result.store.place(result.store.documents()[1]), data_.path("s.safetensors") + ": document 2");
  EXPECT_THAT(result.report.empty_documents.first, ElementsAre(data_.path("s.safetensors") + ": document 1"));
}

TEST_F(TokenShardTest, MaskSaysWhichTokensAreTargets) {
  for (const char* dtype : {"U8", "BOOL"}) {
    const ReadResult result = read_tensors(
        {input_ids({1, 2, 3, 4}), shard_tensor<std::uint8_t>("target_mask", dtype, {1, 0, 0, 1})});
    EXPECT_TRUE(result.store.is_target(0));
    EXPECT_FALSE(result.store.is_target(1));
    EXPECT_FALSE(result.store.is_target(2));
    EXPECT_TRUE(result.store.is_target(3));
    EXPECT_EQ(result.store.count_targets(1, 4), 1);
  }
}

TEST_F(TokenShardTest, MaskOfOneShardLeavesTheOthersAlone) {
  data_.write("d/1.safetensors", safetensors_bytes({input_ids({1, 2})}));
  data_.write("d/2.safetensors", safetensors_bytes({input_ids({3, 4}), target_mask({0, 1})}));
  data_.write("d/3.safetensors", safetensors_bytes({input_ids({5, 6})}));
  const ReadResult result = read(data_.path("d"));
  std::vector<bool> mask;
  for (std::int64_t i = 0; i < 6; ++i) mask.push_back(result.store.is_target(i));
  EXPECT_THAT(mask, ElementsAre(true, true, false, true, true, true));
}

TEST_F(TokenShardTest, LongShardIsReadWholeAcrossBlocks) {
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> mask;
  for (std::int64_t i = 0; i < 600'001; ++i) {
    ids.push_back(i * 31 % 997);
    mask.push_back(i % 3 == 0 ? 0 : 1);
  }
  const ReadResult result =
      read_tensors({shard_tensor<std::uint16_t>("input_ids", "U16", ids), target_mask(mask)});
  const std::vector<std::int32_t> stored = result.ids();
  ASSERT_EQ(stored.size(), ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ASSERT_EQ(stored[i], ids[i]) << i;
    ASSERT_EQ(result.store.is_target(static_cast<std::int64_t>(i)), mask[i] == 1) << i;
  }
}

TEST_F(TokenShardTest, WrongTensorsAreRefused) {
  const ShardTensor ids = input_ids({1, 2, 3});
  EXPECT_THAT(refusal({}), HasSubstr("no tensor 'input_ids'"));
  EXPECT_THAT(refusal({ids, shard_tensor<std::int64_t>("labels", "I64", {1, 2, 3})}), HasSubstr("'labels'"));
  EXPECT_THAT(
      refusal({shard_tensor<float>("input_ids", "F32", {1, 2})}),
      AllOf(HasSubstr("'input_ids'"), HasSubstr("fp32"), HasSubstr("uint16, int32, uint32 or int64")));
  EXPECT_THAT(refusal({shard_tensor<std::uint8_t>("input_ids", "U8", {1, 2})}), HasSubstr("uint8"));
  EXPECT_THAT(refusal({{"input_ids", "I32", "[1,3]", ids.bytes}}),
              AllOf(HasSubstr("rank 2"), HasSubstr("rank 1")));
  EXPECT_THAT(refusal({ids, shard_tensor<std::int32_t>("target_mask", "I32", {1, 1, 1})}),
              AllOf(HasSubstr("'target_mask'"), HasSubstr("int32"), HasSubstr("uint8 or bool")));
  EXPECT_THAT(refusal({ids, target_mask({1, 1})}), AllOf(HasSubstr("2 elements, input_ids 3")));
  EXPECT_THAT(refusal({ids, shard_tensor<std::int32_t>("document_offsets", "I32", {0, 3})}),
              AllOf(HasSubstr("'document_offsets'"), HasSubstr("int32"), HasSubstr("int64")));
}

TEST_F(TokenShardTest, WrongOffsetsAreRefusedByElement) {
  const ShardTensor ids = input_ids({1, 2, 3, 4});
  EXPECT_THAT(refusal({ids, document_offsets({1, 4})}), HasSubstr("element 0 is 1: the first must be 0"));
  EXPECT_THAT(refusal({ids, document_offsets({0, 3, 2, 4})}), HasSubstr("element 2 is 2: less than 3"));
  EXPECT_THAT(refusal({ids, document_offsets({0, 5})}), HasSubstr("element 1 is 5: beyond the 4 tokens"));
  EXPECT_THAT(refusal({ids, document_offsets({0, 3})}), HasSubstr("element 1 is 3: the last must be 4"));
  EXPECT_THAT(refusal({ids, document_offsets({0, -1, 4})}), HasSubstr("element 1 is -1"));
  EXPECT_THAT(refusal({ids, document_offsets({0})}), HasSubstr("the last must be 4"));
  // The structure of a shard is never skipped.
  EXPECT_THAT(refusal({ids, document_offsets({0, 3})}, 1000, OnBadLine::skip),
              HasSubstr("the last must be 4"));
}

TEST_F(TokenShardTest, TokenOutsideTheVocabularyIsRefusedByIndexAndValue) {
  EXPECT_THAT(refusal({input_ids({1, 2, 257, 3})}, 257),
              AllOf(HasSubstr("'input_ids': element 2 is 257"), HasSubstr("vocabulary of 257"),
                    HasSubstr("on_bad_line: skip")));
  EXPECT_THAT(refusal({input_ids({1, -5})}), HasSubstr("element 1 is -5"));
  EXPECT_THAT(refusal({shard_tensor<std::int64_t>("input_ids", "I64", {std::int64_t{1} << 32})}),
              HasSubstr("element 0 is 4294967296"));
  EXPECT_THAT(refusal({input_ids({1, 2, 3}), document_offsets({0, 1, 3}), target_mask({1, 1, 2})}),
              AllOf(HasSubstr("document 1"), HasSubstr("'target_mask': element 2 is 2")));
  EXPECT_THAT(read_tensors({input_ids({0, 256})}, 257).ids(), ElementsAre(0, 256));
}

TEST_F(TokenShardTest, BadDocumentsAreSkippedWholeWithTheirPlaces) {
  const ReadResult result =
      read_tensors({input_ids({1, 2, 3, 9999, -4, 6, 7, 8}), document_offsets({0, 2, 6, 8}),
                    target_mask({0, 1, 0, 1, 1, 1, 0, 1})},
                   1000, OnBadLine::skip);
  EXPECT_THAT(result.ids(), ElementsAre(1, 2, 7, 8));
  ASSERT_EQ(result.store.documents().size(), 2u);
  EXPECT_EQ(result.store.documents()[1].number, 2);
  EXPECT_FALSE(result.store.is_target(2));
  EXPECT_TRUE(result.store.is_target(3));
  EXPECT_EQ(result.report.bad_documents.count, 1);
  EXPECT_THAT(result.report.bad_documents.first.at(0),
              AllOf(HasSubstr("document 1"), HasSubstr("element 3 is 9999")));
  EXPECT_THAT(result.report.to_text(), HasSubstr("element 3 is 9999"));
}

TEST_F(TokenShardTest, ShardWithoutTokensIsAnEmptyFile) {
  const ReadResult result = read_tensors({input_ids({}), document_offsets({0})});
  EXPECT_TRUE(result.store.documents().empty());
  EXPECT_EQ(result.report.empty_files.count, 1);
}

TEST_F(TokenShardTest, FileThatIsNoSafetensorsIsRefusedByName) {
  const std::string path = data_.write("x.safetensors", "not a safetensors file at all");
  EXPECT_THAT(message_of<FileError>([&] { read(path); }), HasSubstr(path));
}

}  // namespace
}  // namespace layerstream::io
