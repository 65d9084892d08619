#include "io/metrics_tensorboard.hpp"

#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <algorithm>

#include <filesystem>

#include "core/error.hpp"
#include "data_files.hpp"
#include "faulty_file_system.hpp"
#include "io/crc32c.hpp"
#include "io/file_source.hpp"
#include "io/tensorboard_events.hpp"

namespace layerstream::io {
namespace {

using testing::DataDirectory;
using testing::FaultyFileSystem;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

/// Bytes from hexadecimal digits; blanks do not count.
std::string bytes(std::string_view digits) {
  std::string result;
  int high = -1;
  for (const char c : digits) {
    if (c == ' ') continue;
    const int value = c <= '9' ? c - '0' : c - 'a' + 10;
    if (high >= 0) result += static_cast<char>(16 * high + value);
    high = high >= 0 ? -1 : value;
  }
  return result;
}

std::vector<std::filesystem::path> files_in(const std::string& directory) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) files.push_back(entry.path());
  return files;
}

TEST(Crc32c, TheExamplesOfRfc3720) {
  std::string ascending, descending;
  for (int i = 0; i < 32; ++i) ascending += static_cast<char>(i);
  descending.assign(ascending.rbegin(), ascending.rend());
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eU);
  EXPECT_EQ(crc32c(descending), 0x113fdb5cU);
  // The check value of the CRC catalogue.
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(""), 0U);
}

// Encoded by hand from the .proto files: key = field number * 8 + wire type.
TEST(TensorBoardEvents, AreProtocolBuffers) {
  EXPECT_EQ(version_event(1.5), bytes("09 000000000000f83f 1a 0d") + "brain.Event:2");
  EXPECT_EQ(restart_event(1.5, 300), bytes("09 000000000000f83f 10 ac02 3a 02 0801"));
  EXPECT_EQ(scalar_event(1.5, 3, {{"a/b", 2.5F}}),
            bytes("09 000000000000f83f 10 03 2a 0c 0a 0a 0a 03 612f62 15 00002040"));
}

TEST(TensorBoardEvents, ARecordHasItsLengthAndTwoMaskedSums) {
  const auto masked = [](std::uint32_t crc) { return ((crc >> 15U) | (crc << 17U)) + 0xa282ead8U; };
  const auto number_at = [](const std::string& text, std::size_t at) {
    std::uint32_t number = 0;
    for (std::size_t i = 4; i-- > 0;) number = number << 8U | static_cast<unsigned char>(text[at + i]);
    return number;
  };
  const std::string record = tf_record("event");
  ASSERT_EQ(record.size(), 8U + 4U + 5U + 4U);
  EXPECT_EQ(record.substr(0, 8), bytes("05 00000000000000"));
  EXPECT_EQ(number_at(record, 8), masked(crc32c(record.substr(0, 8))));
  EXPECT_EQ(record.substr(12, 5), "event");
  EXPECT_EQ(number_at(record, 17), masked(crc32c("event")));
}

TEST(TensorBoardMetrics, TagsAreThoseOfHuggingFace) {
  const DataDirectory directory;
  TensorBoardMetrics metrics(directory.path("tensorboard"));
  metrics.write(1, {{"loss", 2.5}, {"grad_norm", 1.0}, {"applied", true}, {"num_tokens", std::int64_t{7}}});
  metrics.write(1, {{"eval_loss", 2.5}});
  const auto files = files_in(directory.path("tensorboard"));
  ASSERT_EQ(files.size(), 1U);
  EXPECT_THAT(files[0].filename().string(),
              MatchesRegex("events\\.out\\.tfevents\\.[0-9]{10}\\..+\\.[0-9]+"));
  const std::string text = read_text(files[0]);
  for (const char* tag : {"train/loss", "train/grad_norm", "train/num_tokens", "eval/loss"})
    EXPECT_THAT(text, HasSubstr(tag));
  EXPECT_THAT(text, Not(HasSubstr("applied")));
}

TEST(TensorBoardMetrics, EachProcessHasAFileThatSupersedesWhatItRepeats) {
  const DataDirectory directory;
  { TensorBoardMetrics(directory.root()).write(1, {{"loss", 2.5}}); }
  { TensorBoardMetrics(directory.root(), 41).write(42, {{"loss", 2.5}}); }
  auto files = files_in(directory.root());
  ASSERT_EQ(files.size(), 2U);
  // Readers go by the names, also within a second.
  std::ranges::sort(files);
  // step: 42, session_log{status: START}
  const std::string restart = bytes("10 2a 3a 02 0801");
  EXPECT_THAT(read_text(files[0]), Not(HasSubstr(restart)));
  EXPECT_THAT(read_text(files[1]), HasSubstr(restart));
}

TEST(TensorBoardMetrics, FullDiskIsAnErrorAndLeavesWholeRecords) {
  const DataDirectory directory;
  const auto before = [&] { return read_text(files_in(directory.root()).at(0)); };
  // 1: open; 2: what the file begins with; 3: half of the event.
  TensorBoardMetrics metrics(directory.root(), 0,
                             std::make_shared<FaultyFileSystem>(FaultyFileSystem::Fault::disk_full_from, 3));
  const std::string whole = before();
  EXPECT_THROW(metrics.write(1, {{"loss", 2.5}}), FileError);
  EXPECT_EQ(before(), whole);
}

}  // namespace
}  // namespace layerstream::io
