#include "io/safetensors.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "data_files.hpp"
#include "faulty_file_system.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using testing::DataDirectory;
using ::testing::ElementsAre;
using testing::FaultyFileSystem;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Pair;
using ::testing::StartsWith;

std::vector<std::byte> bytes_of(const SafetensorsFile& file, const std::string& name) {
  std::vector<std::byte> bytes(file.find(name)->bytes());
  file.read(*file.find(name), 0, bytes);
  return bytes;
}

template <class T>
std::vector<T> values_of(const SafetensorsFile& file, const std::string& name) {
  std::vector<T> values(static_cast<std::size_t>(file.find(name)->numel()));
  file.read(*file.find(name), 0, std::as_writable_bytes(std::span(values)));
  return values;
}

std::vector<std::byte> pattern(std::size_t count, unsigned seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::byte>((i * 131 + seed * 17 + i / 251) & 0xff);
  return bytes;
}

// tools/goldens/safetensors_fixture.py, which lists these values, made the file with the Python package.
class ReferenceFile : public ::testing::Test {
 protected:
  SafetensorsFile file_{std::string(std::getenv("LAYERSTREAM_TEST_DATA")) +
                        "/golden/safetensors/reference.safetensors"};
};

TEST_F(ReferenceFile, HasItsTensorsAndMetadata) {
  EXPECT_EQ(file_.entries().size(), 14u);
  EXPECT_THAT(file_.metadata(), ElementsAre(Pair("format", "pt"), Pair("note", "größer\nthan one line")));
  EXPECT_EQ(file_.find("no such tensor"), nullptr);
}

TEST_F(ReferenceFile, EachDtypeReadsAsItsValues) {
  EXPECT_EQ(file_.find("float64")->dtype, DType::f64);
  EXPECT_THAT(values_of<double>(file_, "float64"), ElementsAre(0.1, -1.25, 1e300));
  EXPECT_EQ(file_.find("float32")->dtype, DType::f32);
  const std::vector<float> f32 = values_of<float>(file_, "float32");
  EXPECT_THAT(f32, ElementsAre(0.1f, -2.0f, 3e38f, std::numeric_limits<float>::denorm_min(), INFINITY, 0.0f));
  EXPECT_TRUE(std::signbit(f32[5]));
  EXPECT_EQ(file_.find("float16")->dtype, DType::f16);
  EXPECT_THAT(values_of<std::uint16_t>(file_, "float16"), ElementsAre(0x3c00, 0xb800, 0x7bff, 0x0001));
  EXPECT_EQ(file_.find("bfloat16")->dtype, DType::bf16);
  EXPECT_THAT(values_of<std::uint16_t>(file_, "bfloat16"), ElementsAre(0x3f80, 0xc040, 0x7f62));
  EXPECT_EQ(file_.find("int64")->dtype, DType::i64);
  EXPECT_THAT(values_of<std::int64_t>(file_, "int64"), ElementsAre(INT64_MIN, INT64_MAX));
  EXPECT_EQ(file_.find("int32")->dtype, DType::i32);
  EXPECT_THAT(values_of<std::int32_t>(file_, "int32"), ElementsAre(INT32_MIN, INT32_MAX));
  EXPECT_EQ(file_.find("int16")->dtype, DType::i16);
  EXPECT_THAT(values_of<std::int16_t>(file_, "int16"), ElementsAre(INT16_MIN, INT16_MAX));
  EXPECT_EQ(file_.find("int8")->dtype, DType::i8);
  EXPECT_THAT(values_of<std::int8_t>(file_, "int8"), ElementsAre(-128, 127, 0));
  EXPECT_EQ(file_.find("uint8")->dtype, DType::u8);
  EXPECT_THAT(values_of<std::uint8_t>(file_, "uint8"), ElementsAre(0, 255, 7));
  EXPECT_EQ(file_.find("bool")->dtype, DType::boolean);
  EXPECT_THAT(values_of<std::uint8_t>(file_, "bool"), ElementsAre(1, 0, 1));
}

TEST_F(ReferenceFile, ScalarEmptyAndHighRankHaveTheirShapes) {
  EXPECT_TRUE(file_.find("scalar")->shape.empty());
  EXPECT_THAT(values_of<float>(file_, "scalar"), ElementsAre(42.5f));
  EXPECT_THAT(file_.find("empty")->shape, ElementsAre(0, 7));
  EXPECT_EQ(file_.find("empty")->bytes(), 0u);
  EXPECT_THAT(file_.find("rank5")->shape, ElementsAre(2, 2, 2, 2, 2));
  EXPECT_EQ(values_of<std::int32_t>(file_, "rank5")[31], 31);
  EXPECT_THAT(values_of<std::int64_t>(file_, "name \"with\" \\ and é"), ElementsAre(1));
}

TEST(SafetensorsFile, ReadsAnyRangeOfATensorWithAndWithoutThePageCache) {
  const DataDirectory directory;
  const std::vector<std::byte> data = pattern(300'000, 1);
  {
    SafetensorsWriter writer(std::make_shared<FileSystem>(), directory.path("m"),
                             {{"before", DType::u8, {11}}, {"w", DType::u8, {300'000}}});
    writer.append("before", pattern(11, 2));
    writer.append("w", data);
    writer.finish();
  }
  for (const PageCache cache : {PageCache::keep, PageCache::drop}) {
    const SafetensorsFile file(directory.path("m"), cache);
    for (const auto& [offset, count] :
         {std::pair{0, 300'000}, {1, 1}, {4095, 4098}, {299'999, 1}, {300'000, 0}}) {
      std::vector<std::byte> out(static_cast<std::size_t>(count));
      file.read(*file.find("w"), static_cast<std::uint64_t>(offset), out);
      EXPECT_TRUE(std::equal(out.begin(), out.end(), data.begin() + offset)) << offset;
    }
  }
}

TEST(SafetensorsFile, ReadOutsideTheTensorIsABrokenContract) {
  const DataDirectory directory;
  const std::string path = directory.write("m", testing::safetensors_bytes({{"w", "U8", "[4]", "abcd"}}));
  const SafetensorsFile file(path);
  std::vector<std::byte> out(3);
  EXPECT_THAT(message_of<ContractError>([&] { file.read(*file.find("w"), 2, out); }),
              HasSubstr("bytes [2, 5) of tensor \"w\" of " + path + ", which has 4"));
  EXPECT_THROW(file.read(*file.find("w"), UINT64_MAX, out), ContractError);
}

TEST(SafetensorsFile, FileThatShrinksAfterOpeningIsNamedWithTheTensor) {
  const DataDirectory directory;
  const std::string path = directory.write("m", testing::safetensors_bytes({{"w", "U8", "[4]", "abcd"}}));
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  std::vector<std::byte> out(4);
  EXPECT_THAT(message_of<FileError>([&] { file.read(*file.find("w"), 0, out); }),
              AllOf(StartsWith("tensor \"w\": " + path + ": ends at byte "), HasSubstr("when opened")));
}

TEST(SafetensorsFile, MovedFileStillFindsAndReads) {
  const DataDirectory directory;
  SafetensorsFile first(directory.write("m", testing::safetensors_bytes({{"w", "U8", "[4]", "abcd"}})));
  const SafetensorsFile second = std::move(first);
  EXPECT_THAT(values_of<char>(second, "w"), ElementsAre('a', 'b', 'c', 'd'));
}

TEST(SafetensorsWriter, RoundTripOfEveryDtypeInPiecesOfAnySize) {
  const DataDirectory directory;
  const std::vector<TensorSpec> tensors = aligned_order({{"f64", DType::f64, {3}},
                                                         {"f32", DType::f32, {2, 2}},
                                                         {"f16", DType::f16, {5}},
                                                         {"bf16", DType::bf16, {7}},
                                                         {"i64", DType::i64, {1}},
                                                         {"i32", DType::i32, {}},
                                                         {"i16", DType::i16, {1, 1, 1, 1, 1, 3}},
                                                         {"i8", DType::i8, {9}},
                                                         {"u64", DType::u64, {2}},
                                                         {"u32", DType::u32, {0, 5}},
                                                         {"u16", DType::u16, {2}},
                                                         {"u8", DType::u8, {3}},
                                                         {"bool", DType::boolean, {2}},
                                                         {"\"\\\n é", DType::u8, {1}}});
  std::uint64_t total = 0;
  for (const TensorEntry& entry : lay_out_safetensors(tensors, "m")) total = entry.end;
  const std::vector<std::byte> data = pattern(total, 3);
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, data.size()}) {
    SafetensorsWriter writer(std::make_shared<FileSystem>(), directory.path("m"), tensors,
                             {{"format", "pt"}});
    for (std::size_t i = 0; i < data.size(); i += piece) {
      writer.append(std::span(data).subspan(i, std::min(piece, data.size() - i)));
    }
    writer.finish();
    const SafetensorsFile file(directory.path("m"));
    EXPECT_EQ((std::filesystem::file_size(directory.path("m")) - total) % 8, 0u) << "header padding";
    EXPECT_THAT(file.metadata(), ElementsAre(Pair("format", "pt")));
    ASSERT_EQ(file.entries().size(), tensors.size());
    for (const TensorSpec& tensor : tensors) {
      const TensorEntry* const entry = file.find(tensor.name);
      ASSERT_NE(entry, nullptr) << tensor.name;
      EXPECT_EQ(entry->dtype, tensor.dtype);
      EXPECT_EQ(entry->shape, tensor.shape);
      const std::vector<std::byte> bytes = bytes_of(file, tensor.name);
      EXPECT_TRUE(
          std::equal(bytes.begin(), bytes.end(), data.begin() + static_cast<std::ptrdiff_t>(entry->begin)));
    }
  }
}

TEST(SafetensorsWriter, FileWithoutTensorsIsValid) {
  const DataDirectory directory;
  SafetensorsWriter writer(std::make_shared<FileSystem>(), directory.path("m"), {});
  writer.finish();
  EXPECT_TRUE(SafetensorsFile(directory.path("m")).entries().empty());
}

class SafetensorsWriterContract : public ::testing::Test {
 protected:
  std::string refusal(const std::vector<TensorSpec>& tensors) {
    return message_of<ContractError>(
        [&] { SafetensorsWriter(std::make_shared<FileSystem>(), directory_.path("m"), tensors); });
  }
  void TearDown() override {
    EXPECT_FALSE(std::filesystem::exists(directory_.path("m"))) << "a part of a file is left";
  }
  DataDirectory directory_;
};

TEST_F(SafetensorsWriterContract, RefusesTensorsThatMakeNoValidFile) {
  EXPECT_THAT(refusal({{"a", DType::u8, {1}}, {"a", DType::u8, {1}}}),
              HasSubstr("tensor \"a\" is declared twice"));
  EXPECT_THAT(refusal({{"__metadata__", DType::u8, {1}}}), HasSubstr("the name is reserved"));
  EXPECT_THAT(refusal({{"a", DType::u8, {-1}}}), HasSubstr("shape [-1] is negative or overflows"));
  EXPECT_THAT(refusal({{"a", DType::f32, {INT64_MAX}}}), HasSubstr("is negative or overflows"));
  EXPECT_THAT(refusal({{"a\xff", DType::u8, {1}}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(refusal({{"a", DType::u8, {3}}, {"b", DType::f32, {1}}}),
              HasSubstr("tensor \"b\" would begin at byte 3, which F32 cannot"));
}

TEST_F(SafetensorsWriterContract, RefusesDataOutOfOrderOrBeyondTheEnd) {
  SafetensorsWriter writer(std::make_shared<FileSystem>(), directory_.path("m"),
                           {{"e", DType::f32, {0}}, {"a", DType::u8, {2}}, {"b", DType::u8, {2}}});
  EXPECT_THAT(message_of<ContractError>([&] { writer.append("b", pattern(1, 0)); }),
              HasSubstr("tensor \"b\" comes, it is the turn of \"a\""));
  EXPECT_THAT(message_of<ContractError>([&] { writer.append("a", pattern(3, 0)); }),
              HasSubstr("tensor \"a\": 3 bytes more, it lacks 2"));
  EXPECT_THAT(message_of<ContractError>([&] { writer.append(pattern(5, 0)); }),
              HasSubstr("5 bytes more for "));
  writer.append("a", pattern(2, 0));
  writer.append("b", pattern(1, 0));
  EXPECT_THAT(message_of<ContractError>([&] { writer.finish(); }),
              HasSubstr("tensor \"b\" has 1 of its 2 bytes"));
}

TEST_F(SafetensorsWriterContract, UnfinishedFileIsRemoved) {
  SafetensorsWriter writer(std::make_shared<FileSystem>(), directory_.path("m"), {{"a", DType::u8, {2}}});
  writer.append(pattern(1, 0));
}

TEST_F(SafetensorsWriterContract, EveryFailingCallBecomesAFileErrorNamingTheFile) {
  const auto write = [&](const std::shared_ptr<FileSystem>& files) {
    SafetensorsWriter writer(files, directory_.path("m"),
                             {{"a", DType::u8, {1000}}, {"b", DType::u8, {1000}}});
    writer.append(pattern(1500, 0));
    writer.append(pattern(500, 0));
    writer.finish();
  };
  const auto counter = std::make_shared<FaultyFileSystem>();
  write(counter);
  // open, reserve, write header, write, write, fsync, close
  ASSERT_EQ(counter->calls(), 7);
  std::filesystem::remove(directory_.path("m"));
  for (int n = 1; n <= counter->calls(); ++n) {
    const auto faulty = std::make_shared<FaultyFileSystem>(FaultyFileSystem::Fault::error, n, EIO);
    EXPECT_THAT(message_of<FileError>([&] { write(faulty); }),
                AllOf(StartsWith(directory_.path("m") + ": "), HasSubstr("failed: Input/output error")))
        << faulty->name_of_call();
    EXPECT_FALSE(std::filesystem::exists(directory_.path("m"))) << faulty->name_of_call();
  }
}

TEST_F(SafetensorsWriterContract, FullDiskInTheMiddleOfAWriteNamesTheBytesWanted) {
  const auto faulty = std::make_shared<FaultyFileSystem>(FaultyFileSystem::Fault::disk_full_from, 4);
  const std::string message = message_of<FileError>([&] {
    SafetensorsWriter writer(faulty, directory_.path("m"), {{"a", DType::u8, {1000}}});
    writer.append(pattern(1000, 0));
  });
  EXPECT_THAT(message, AllOf(HasSubstr("writing 1000 bytes (500 of them came through"),
                             HasSubstr("No space left on device (free space there")));
}

}  // namespace
}  // namespace layerstream::io
