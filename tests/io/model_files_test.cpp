#include "io/model_files.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "data_files.hpp"

namespace layerstream::io {
namespace {

using ::testing::AllOf;
using testing::DataDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::safetensors_bytes;
using testing::ShardTensor;
using ::testing::StartsWith;

constexpr const char* index_name = "model.safetensors.index.json";
constexpr const char* shard1 = "model-00001-of-00002.safetensors";
constexpr const char* shard2 = "model-00002-of-00002.safetensors";

class ModelDirectory : public ::testing::Test {
 protected:
  void write_shards() {
    directory_.write(shard1, safetensors_bytes({{"a", "U8", "[2]", "AA"}}));
    directory_.write(shard2, safetensors_bytes({{"b", "U8", "[3]", "BBB"}, {"c", "U8", "[1]", "C"}}));
  }
  void write_index(const std::string& weight_map) {
    directory_.write(index_name, R"({"metadata":{"total_size":6},"weight_map":)" + weight_map + "}");
  }
  std::string refusal() {
    return message_of<FileError>([&] { ModelFiles{directory_.root()}; });
  }
  DataDirectory directory_;
};

TEST_F(ModelDirectory, SingleFile) {
  directory_.write("model.safetensors", safetensors_bytes({{"a", "U8", "[2]", "AA"}}));
  const ModelFiles files(directory_.root());
  EXPECT_THAT(files.names(), ElementsAre("a"));
  EXPECT_EQ(files.find("a")->file, directory_.path("model.safetensors"));
  EXPECT_EQ(files.find("b"), nullptr);
}

TEST_F(ModelDirectory, Shards) {
  write_shards();
  write_index(std::string(R"({"a":")") + shard1 + R"(","b":")" + shard2 + R"(","c":")" + shard2 + "\"}");
  const ModelFiles files(directory_.root());
  EXPECT_THAT(files.names(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(files.find("c")->file, directory_.path(shard2));
  std::vector<std::byte> bytes(2);
  files.read(*files.find("b"), 1, bytes);
  EXPECT_THAT(bytes, ElementsAre(std::byte{'B'}, std::byte{'B'}));
}

TEST_F(ModelDirectory, TensorThatTheIndexDoesNotNameIsStillListed) {
  write_shards();
  write_index(std::string(R"({"a":")") + shard1 + R"(","b":")" + shard2 + "\"}");
  EXPECT_THAT(ModelFiles(directory_.root()).names(), ElementsAre("a", "b", "c"));
}

TEST_F(ModelDirectory, NoWeights) {
  EXPECT_THAT(refusal(),
              StartsWith(directory_.root() + ": holds neither model.safetensors nor " + index_name));
}

TEST_F(ModelDirectory, AbsentShardIsNamed) {
  write_shards();
  std::filesystem::remove(directory_.path(shard2));
  write_index(std::string(R"({"a":")") + shard1 + R"(","b":")" + shard2 + "\"}");
  EXPECT_EQ(refusal(), directory_.path(shard2) + ": shard is absent, though " + index_name +
                           " says that tensor \"b\" is in it; fetch the model again");
}

TEST_F(ModelDirectory, ShardThatIsAGitLfsPointer) {
  write_shards();
  directory_.write(shard2, "version https://git-lfs.github.com/spec/v1\n");
  write_index(std::string(R"({"a":")") + shard1 + R"(","b":")" + shard2 + "\"}");
  EXPECT_THAT(refusal(), AllOf(StartsWith(directory_.path(shard2)), HasSubstr("git lfs pull")));
}

TEST_F(ModelDirectory, TensorThatItsShardLacks) {
  write_shards();
  write_index(std::string(R"({"a":")") + shard1 + R"(","x":")" + shard2 + "\"}");
  EXPECT_EQ(refusal(),
            directory_.path(shard2) + ": lacks tensor \"x\", which " + index_name + " says is in it");
}

TEST_F(ModelDirectory, TensorInAnotherShardThanTheIndexSays) {
  write_shards();
  write_index(std::string(R"({"a":")") + shard2 + R"(","b":")" + shard1 + "\"}");
  EXPECT_EQ(refusal(), directory_.path(shard2) + ": lacks tensor \"a\", which " + index_name +
                           " says is in it (it is in " + directory_.path(shard1) + ")");
}

TEST_F(ModelDirectory, TensorInTwoShards) {
  write_shards();
  directory_.write(shard1, safetensors_bytes({{"a", "U8", "[2]", "AA"}, {"c", "U8", "[1]", "C"}}));
  write_index(std::string(R"({"a":")") + shard1 + R"(","c":")" + shard2 + "\"}");
  EXPECT_EQ(refusal(), directory_.path(shard2) + ": tensor \"c\" is also in " + directory_.path(shard1) +
                           "; which one is meant?");
}

TEST_F(ModelDirectory, ShardOutsideTheDirectoryIsRefused) {
  write_shards();
  for (const std::string name :
       {"../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\\\\b"}) {
    write_index(R"({"a":")" + name + "\"}");
    EXPECT_THAT(refusal(), AllOf(StartsWith(directory_.path(index_name) + ": weight_map of tensor \"a\" is "),
                                 HasSubstr("not a file name in this directory")))
        << name;
  }
}

TEST_F(ModelDirectory, MalformedIndex) {
  const std::string path = directory_.path(index_name);
  directory_.write(index_name, "not json");
  EXPECT_THAT(refusal(), StartsWith(path + ": is not JSON: "));
  directory_.write(index_name, "[]");
  EXPECT_EQ(refusal(), path + ": has no object \"weight_map\"");
  directory_.write(index_name, R"({"weight_map":[]})");
  EXPECT_EQ(refusal(), path + ": has no object \"weight_map\"");
  write_index(R"({"a":1})");
  EXPECT_EQ(refusal(), path + ": weight_map of tensor \"a\" is not a string");
  write_index(R"({"a":"x","a":"y"})");
  EXPECT_EQ(refusal(), path + ": key \"a\" occurs twice in an object");
}

// Widening of all 65,536 values of each 16-bit format, in one read and in uneven ones, against core/half.hpp.
class Widening : public ::testing::TestWithParam<DType> {};

TEST_P(Widening, EveryValueIsExact) {
  const DataDirectory directory;
  std::string bytes(2 * 65536, '\0');
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    std::memcpy(bytes.data() + 2 * i, &bits, 2);
  }
  const std::string name(safetensors_name(GetParam()));
  directory.write("model.safetensors", safetensors_bytes({{"w", name, "[256,256]", bytes}}));
  const ModelFiles files(directory.root());
  const auto expected = [&](std::uint32_t i) {
    const auto bits = static_cast<std::uint16_t>(i);
    return std::bit_cast<std::uint32_t>(GetParam() == DType::bf16 ? to_float(bf16{bits})
                                                                  : to_float(fp16{bits}));
  };
  for (const std::uint32_t piece : {65536u, 2048u, 2049u, 4097u, 10'007u}) {
    for (std::uint32_t begin = 0; begin < 65536; begin += piece) {
      std::vector<float> out(std::min(piece, 65536 - begin));
      files.read_as_float(*files.find("w"), begin, out);
      for (std::uint32_t i = 0; i < out.size(); ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), expected(begin + i)) << begin + i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Widening, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_F(ModelDirectory, SinglePrecisionIsReadBitForBit) {
  const std::vector<std::uint32_t> bits{0x00000001, 0x7fc12345, 0xff800000, 0x3dcccccd, 0x80000000};
  std::string bytes(4 * bits.size(), '\0');
  std::memcpy(bytes.data(), bits.data(), bytes.size());
  directory_.write("model.safetensors", safetensors_bytes({{"w", "F32", "[5]", bytes}}));
  const ModelFiles files(directory_.root());
  std::vector<float> out(4);
  files.read_as_float(*files.find("w"), 1, out);
  EXPECT_EQ(std::memcmp(out.data(), bits.data() + 1, 16), 0);
}

TEST_F(ModelDirectory, OtherDtypesAreRefusedByName) {
  directory_.write("model.safetensors",
                   safetensors_bytes({{"d", "F64", "[1]", "12345678"}, {"i", "I32", "[1]", "1234"}}));
  const ModelFiles files(directory_.root());
  std::vector<float> out(1);
  EXPECT_EQ(message_of<FileError>([&] { files.read_as_float(*files.find("d"), 0, out); }),
            directory_.path("model.safetensors") + ": tensor \"d\" is F64; weights must be F32, BF16 or F16");
  EXPECT_THROW(files.read_as_float(*files.find("i"), 0, out), FileError);
}

}  // namespace
}  // namespace layerstream::io
