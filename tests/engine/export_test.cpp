// The directory that an export makes: complete or not there at all.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model_files_fixture.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Export : public ::testing::Test {
 protected:
  Export() : slabs_(spec_) { slabs_.fill_with_random_bits(); }
  void to(const fs::path& target, std::uint64_t max_shard_bytes = std::uint64_t{5} << 30) {
    export_model(*slabs_.store, {.directory = target,
                                 .config_json = config_,
                                 .dtype = DType::f32,
                                 .companions_from = companions_,
                                 .max_shard_bytes = max_shard_bytes});
  }
  ModelSpec spec_ = tiny_spec(false);
  Slabs slabs_;
  std::string config_ =
      R"({"z_first": [1, {"deep": null}], "model_type": "qwen3", "torch_dtype": "bfloat16"})";
  fs::path companions_;
  ScratchDirectory scratch_;
};

TEST_F(Export, UnknownConfigKeysAndCompanionFilesSurvive) {
  companions_ = scratch_.path() / "source";
  const std::vector<std::string> kept{"tokenizer.json",         "tokenizer_config.json",
                                      "generation_config.json", "special_tokens_map.json",
                                      "chat_template.jinja",    "merges.txt"};
  for (const std::string& name : kept) write_file(companions_ / name, name + " \xff\n");
  write_file(companions_ / "optimizer.pt", "not a part of the model");
  to(scratch_.path() / "export");
  for (const std::string& name : kept)
    EXPECT_EQ(read_file(scratch_.path() / "export" / name), name + " \xff\n");
  EXPECT_FALSE(fs::exists(scratch_.path() / "export/optimizer.pt"));
  const auto json = nlohmann::ordered_json::parse(read_file(scratch_.path() / "export/config.json"));
  EXPECT_EQ(json.dump(), R"({"z_first":[1,{"deep":null}],"model_type":"qwen3","torch_dtype":"float32"})");
}

TEST_F(Export, ShardsHoldAtMostTheirLimitAndAnIndexThatIsRight) {
  constexpr std::uint64_t limit = 20'000;
  const fs::path target = scratch_.path() / "export";
  to(target, limit);
  std::uint64_t total = 0;
  std::size_t shards = 0;
  const auto index = nlohmann::json::parse(read_file(target / "model.safetensors.index.json"));
  for (const std::string& name : names_in(target)) {
    if (!name.ends_with(".safetensors")) continue;
    ++shards;
    const io::SafetensorsFile file(target / name);
    std::uint64_t bytes = 0;
    for (const io::TensorEntry& entry : file.entries()) {
      bytes += static_cast<std::uint64_t>(entry.numel()) * 4;
      EXPECT_EQ(index["weight_map"][entry.name], name);
    }
    EXPECT_TRUE(bytes <= limit || file.entries().size() == 1) << name << ": " << bytes;
    EXPECT_EQ(file.metadata().at("format"), "pt");
    total += bytes;
  }
  EXPECT_GT(shards, 3U);
  EXPECT_TRUE(fs::exists(target / fmt::format("model-00001-of-{:05}.safetensors", shards)));
  EXPECT_EQ(index["metadata"]["total_size"], total);
  Slabs again(spec_);
  load_weights(io::ModelFiles(target), *again.store);
  EXPECT_TRUE(slab_bytes(*again.store) == slab_bytes(*slabs_.store));
}

TEST_F(Export, ATargetThatHoldsAnythingIsRefusedAndLeftAlone) {
  const fs::path directory = scratch_.path() / "directory";
  write_file(directory / "mine.txt", "mine");
  EXPECT_THAT(refusal([&] { to(directory); }), HasSubstr("directory"));
  EXPECT_EQ(names_in(directory), std::vector<std::string>{"mine.txt"});
  write_file(scratch_.path() / "file", "mine");
  EXPECT_THAT(refusal([&] { to(scratch_.path() / "file"); }), HasSubstr("choose another place"));
  EXPECT_EQ(read_file(scratch_.path() / "file"), "mine");
  EXPECT_EQ(names_in(scratch_.path()).size(), 2U);
}

TEST_F(Export, EveryWayToNameANewDirectoryWorks) {
  fs::create_directories(scratch_.path() / "empty");
  for (const std::string name : {"empty", "slash/", "a/b/../c", "deep/er/still"}) {
    to(scratch_.path() / name);
    EXPECT_NO_THROW(io::ModelFiles((scratch_.path() / name).lexically_normal())) << name;
  }
  write_file(scratch_.path() / "model.tmp/mine.txt", "mine");
  to(scratch_.path() / "model");
  EXPECT_EQ(read_file(scratch_.path() / "model.tmp/mine.txt"), "mine") << "a directory of the user's";
}

TEST_F(Export, AFailureOnTheWayLeavesNothingBehind) {
  config_ = "[not a config]";  // found out after the weights are written
  EXPECT_THROW(to(scratch_.path() / "export"), FileError);
  EXPECT_TRUE(names_in(scratch_.path()).empty());
  fs::create_directories(scratch_.path() / "export");
  EXPECT_THROW(to(scratch_.path() / "export"), FileError);
  EXPECT_EQ(names_in(scratch_.path()), std::vector<std::string>{"export"});
  EXPECT_TRUE(names_in(scratch_.path() / "export").empty());
}

}  // namespace
}  // namespace layerstream::test
