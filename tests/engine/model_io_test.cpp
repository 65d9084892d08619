// Weights between Hugging Face directories and slabs: nothing is guessed, nothing is rounded unasked.

#include "engine/model_io.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "backends/host_region.hpp"
#include "core/half.hpp"
#include "engine_fixture.hpp"
#include "io/safetensors.hpp"
#include "model/hf_config.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

fs::path golden(const std::string& name) {
  const char* const data = std::getenv("LAYERSTREAM_TEST_DATA");
  return fs::path(data == nullptr ? "tests" : data) / "golden" / name;
}

std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write_file(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

/// Message of the FileError that `call` must throw.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const FileError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no FileError";
  return "";
}

/// Slabs without an engine.
class Slabs {
 public:
  explicit Slabs(const ModelSpec& spec) : layout(make_layout(spec)) {
    Ledger planned;
    Arena dry = Arena::dry(Space::host, planned);
    const ParameterStore counted(layout, dry);
    region_ = HostRegion(planned.total(Space::host));
    arena_ = std::make_unique<Arena>(Space::host, region_.data(), region_.bytes(), ledger_);
    store = std::make_unique<ParameterStore>(layout, *arena_);
  }

  template <class Function>
  void for_each(const Function& function) const {
    for (int block = 0; block < layout.num_blocks(); ++block) {
      for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
        function(block, parameter);
      }
    }
  }

  std::vector<std::uint32_t> bits(int block, const Parameter& parameter) const {
    std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
    store->read(block, parameter, 0, values);
    std::vector<std::uint32_t> bits(values.size());
    std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
    return bits;
  }

  /// Every bit pattern that is a finite number; a function of the place alone.
  void fill_with_random_bits() {
    std::uint64_t stream = 100;
    for_each([&](int block, const Parameter& parameter) {
      std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
      for (std::size_t i = 0; i < values.size(); ++i) {
        auto bits = static_cast<std::uint32_t>(uniform_at(9, stream, i) * 4294967296.0);
        if ((bits & 0x7f800000U) == 0x7f800000U) bits ^= 0x40000000U;
        std::memcpy(&values[i], &bits, sizeof(float));
      }
      store->write(block, parameter, 0, values);
      ++stream;
    });
  }

  ModelLayout layout;
  std::unique_ptr<ParameterStore> store;

 private:
  HostRegion region_;
  Ledger ledger_;
  std::unique_ptr<Arena> arena_;
};

/// A tensor as a file has it.
struct RawTensor {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
  friend bool operator==(const RawTensor&, const RawTensor&) = default;
};
using RawTensors = std::map<std::string, RawTensor>;

RawTensors read_tensors(const fs::path& directory) {
  const io::ModelFiles files(directory);
  RawTensors tensors;
  for (const std::string& name : files.names()) {
    const io::TensorEntry& entry = *files.find(name);
    std::vector<std::byte> bytes(static_cast<std::size_t>(entry.numel()) * size_of(entry.dtype));
    files.read(entry, 0, bytes);
    tensors[name] = {entry.dtype, entry.shape, std::move(bytes)};
  }
  return tensors;
}

void write_tensors(const fs::path& directory, const RawTensors& tensors) {
  fs::create_directories(directory);
  std::vector<io::TensorSpec> specs;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i16}) {
    for (const auto& [name, tensor] : tensors) {
      if (tensor.dtype == dtype) specs.push_back({name, tensor.dtype, tensor.shape});
    }
  }
  io::SafetensorsWriter writer(std::make_shared<io::FileSystem>(), directory / "model.safetensors", specs);
  for (const io::TensorSpec& spec : specs) writer.append(spec.name, tensors.at(spec.name).bytes);
  writer.finish();
}

/// fp32 bits of a half in a file, by arithmetic of its own.
std::uint32_t widened(DType dtype, std::uint16_t half) {
  if (dtype == DType::bf16) return static_cast<std::uint32_t>(half) << 16;
  const int exponent = (half >> 10) & 0x1f;
  const int mantissa = half & 0x3ff;
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  if (exponent == 0x1f) return sign | 0x7f800000U | (static_cast<std::uint32_t>(mantissa) << 13);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  const auto value = static_cast<float>(magnitude);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return sign | bits;
}

std::vector<std::uint32_t> widened(const RawTensor& tensor) {
  const std::size_t size = size_of(tensor.dtype);
  std::vector<std::uint32_t> result(tensor.bytes.size() / size);
  for (std::size_t i = 0; i < result.size(); ++i) {
    std::uint16_t half = 0;
    if (size == 4) {
      std::memcpy(&result[i], tensor.bytes.data() + i * 4, 4);
    } else {
      std::memcpy(&half, tensor.bytes.data() + i * 2, 2);
      result[i] = widened(tensor.dtype, half);
    }
  }
  return result;
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

const char* const families[] = {"llama_llama3", "llama_biases_tied",  "llama_mixed_dtypes", "mistral_window",
                                "qwen2_tied",   "qwen2_bf16_sharded", "qwen3_qk_norm"};

// --- 23: what is absent, too much or of another shape ---

class Refused : public ::testing::Test {
 protected:
  /// A model directory with `change` applied to its tensors.
  std::string message_after(const std::function<void(RawTensors&)>& change) {
    RawTensors tensors = read_tensors(golden(name_));
    change(tensors);
    write_tensors(scratch_.path() / "model", tensors);
    Slabs slabs(load_hf_config(golden(name_)));
    slabs.fill_with_random_bits();
    const auto before = slab_bytes(*slabs.store);
    const std::string message =
        refusal([&] { load_weights(io::ModelFiles(scratch_.path() / "model"), *slabs.store); });
    EXPECT_TRUE(slab_bytes(*slabs.store) == before) << "something was read before the refusal";
    return message;
  }
  std::string name_ = "llama_llama3";
  ScratchDirectory scratch_;
};

TEST_F(Refused, OneMessageListsAllThatIsMissingUnexpectedAndMisshapen) {
  const std::string message = message_after([](RawTensors& tensors) {
    tensors.erase("model.layers.0.mlp.up_proj.weight");
    tensors.erase("model.norm.weight");
    tensors["model.layers.7.mlp.up_proj.weight"] = tensors.at("model.layers.1.mlp.up_proj.weight");
    std::swap(tensors.at("model.layers.1.mlp.down_proj.weight").shape[0],
              tensors.at("model.layers.1.mlp.down_proj.weight").shape[1]);
    RawTensor& typed = tensors.at("model.layers.1.input_layernorm.weight");
    typed.dtype = DType::i16;
    typed.bytes.resize(typed.bytes.size() / 2);
  });
  EXPECT_THAT(message,
              AllOf(HasSubstr("missing (2)"), HasSubstr("model.layers.0.mlp.up_proj.weight"),
                    HasSubstr("model.norm.weight"), HasSubstr("unexpected (1)"),
                    HasSubstr("model.layers.7.mlp.up_proj.weight"), HasSubstr("of another shape or type (2)"),
                    HasSubstr("model.layers.1.mlp.down_proj.weight: ["), HasSubstr("wants ["),
                    HasSubstr("model.layers.1.input_layernorm.weight: i16")));
  EXPECT_THAT(message, HasSubstr((scratch_.path() / "model").string()));
}

TEST_F(Refused, AnyAbsentTensorIsNamed) {
  for (const auto& [name, tensor] : read_tensors(golden(name_))) {
    const std::string message = message_after([&](RawTensors& tensors) { tensors.erase(name); });
    EXPECT_THAT(message, AllOf(HasSubstr("missing (1)"), HasSubstr(name), Not(HasSubstr("unexpected"))));
  }
}

TEST_F(Refused, AShapeOfTheSameSizeButAnotherRankIsRefused) {
  EXPECT_THAT(message_after([](RawTensors& tensors) {
                RawTensor& weight = tensors.at("model.norm.weight");
                weight.shape = {weight.shape[0], 1};
              }),
              HasSubstr("model.norm.weight: ["));
}

TEST_F(Refused, AnAbsentShardIsNamed) {
  const fs::path model = scratch_.path() / "sharded";
  fs::copy(golden("qwen2_bf16_sharded"), model);
  fs::remove(model / "model-00003-of-00004.safetensors");
  EXPECT_THAT(refusal([&] { io::ModelFiles files(model); }),
              AllOf(HasSubstr("model-00003-of-00004.safetensors"), HasSubstr("absent")));
}

TEST_F(Refused, ATiedHeadUnderItsOwnNameAndRotaryTablesAreNoFault) {
  name_ = "qwen2_tied";
  RawTensors tensors = read_tensors(golden(name_));
  tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight");
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {DType::f32, {4}, std::vector<std::byte>(16)};
  write_tensors(scratch_.path() / "model", tensors);
  Slabs slabs(load_hf_config(golden(name_)));
  EXPECT_NO_THROW(load_weights(io::ModelFiles(scratch_.path() / "model"), *slabs.store));
}

// --- 24: exactness ---

class Family : public ::testing::TestWithParam<const char*> {
 protected:
  Family() : directory_(golden(GetParam())), spec_(load_hf_config(directory_)) {}
  fs::path exported(const ParameterStore& store, DType dtype, const std::string& name = "export") {
    const fs::path target = scratch_.path() / name;
    export_model(store,
                 {.directory = target, .config_json = read_file(directory_ / "config.json"), .dtype = dtype});
    return target;
  }
  fs::path directory_;
  ModelSpec spec_;
  ScratchDirectory scratch_;
};

INSTANTIATE_TEST_SUITE_P(All, Family, ::testing::ValuesIn(families),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Family, EveryMasterIsTheValueInTheFile) {
  Slabs slabs(spec_);
  load_weights(io::ModelFiles(directory_), *slabs.store);
  const RawTensors tensors = read_tensors(directory_);
  slabs.for_each([&](int block, const Parameter& parameter) {
    EXPECT_TRUE(slabs.bits(block, parameter) == widened(tensors.at(parameter.name))) << parameter.name;
  });
}

TEST_P(Family, ExportInFp32AndLoadingItGivesTheSameSlabs) {
  Slabs slabs(spec_);
  slabs.fill_with_random_bits();  // as after training: lower halves in use
  const fs::path directory = exported(*slabs.store, DType::f32);
  const RawTensors tensors = read_tensors(directory);
  std::size_t count = 0;
  slabs.for_each([&](int block, const Parameter& parameter) {
    EXPECT_TRUE(slabs.bits(block, parameter) == widened(tensors.at(parameter.name))) << parameter.name;
    ++count;
  });
  EXPECT_EQ(tensors.size(), count) << "and nothing else, a tied head's matrix for one";
  EXPECT_EQ(tensors.contains("lm_head.weight"), !spec_.tie_word_embeddings);
  Slabs again(load_hf_config(directory));
  load_weights(io::ModelFiles(directory), *again.store);
  EXPECT_TRUE(slab_bytes(*again.store) == slab_bytes(*slabs.store));
}

/// Tensors with every 16-bit pattern that is a finite number, in `dtype`.
RawTensors all_finite_halves(DType dtype, const ModelLayout& layout) {
  RawTensors tensors;
  std::uint16_t next = 0;
  for (const BlockLayout& block : layout.blocks) {
    for (const Parameter& parameter : block.parameters) {
      RawTensor& tensor = tensors[parameter.name];
      tensor.dtype = dtype;
      for (int i = 0; i < parameter.shape.rank(); ++i) tensor.shape.push_back(parameter.shape[i]);
      tensor.bytes.resize(static_cast<std::size_t>(parameter.numel()) * 2);
      for (std::size_t i = 0; i < tensor.bytes.size(); i += 2) {
        const std::uint16_t exponent = dtype == DType::bf16 ? 0x7f80 : 0x7c00;
        while ((next & exponent) == exponent) ++next;
        std::memcpy(tensor.bytes.data() + i, &next, 2);
        ++next;
      }
    }
  }
  return tensors;
}

TEST(Exactness, EveryHalfGoesThroughLoadAndExportUnchanged) {
  ModelSpec spec = tiny_spec(false);
  spec.vocab_size = 2048;  // 2 x 65,536 elements in embedding and head
  for (const DType dtype : {DType::bf16, DType::f16}) {
    ScratchDirectory scratch;
    Slabs slabs(spec);
    const RawTensors source = all_finite_halves(dtype, slabs.layout);
    write_tensors(scratch.path() / "source", source);
    load_weights(io::ModelFiles(scratch.path() / "source"), *slabs.store);
    slabs.for_each([&](int block, const Parameter& parameter) {
      ASSERT_TRUE(slabs.bits(block, parameter) == widened(source.at(parameter.name))) << parameter.name;
    });
    export_model(*slabs.store, {.directory = scratch.path() / "export", .config_json = "{}", .dtype = dtype});
    EXPECT_TRUE(read_tensors(scratch.path() / "export") == source) << name_of(dtype);
  }
}

TEST(Exactness, AnUntouchedBf16ModelIsExportedByteForByte) {
  const fs::path source = golden("qwen2_bf16_sharded");
  ScratchDirectory scratch;
  Slabs slabs(load_hf_config(source));
  load_weights(io::ModelFiles(source), *slabs.store);
  export_model(*slabs.store, {.directory = scratch.path() / "export",
                              .config_json = read_file(source / "config.json"),
                              .dtype = DType::bf16});
  EXPECT_TRUE(read_tensors(scratch.path() / "export") == read_tensors(source));
}

TEST(Exactness, Bf16ExportRoundsTheMasterToNearestEven) {
  const ModelSpec spec = tiny_spec(true);
  Slabs slabs(spec);
  const Parameter& norm = slabs.layout.blocks.back().at("norm.weight");
  // Two ties, one to each side, and a value whose upper half (ties away) is not its bf16.
  slabs.store->write(slabs.layout.head(), norm, 0, std::vector<float>{1.00390625F, 1.01171875F, 1.0039063F});
  ScratchDirectory scratch;
  export_model(*slabs.store,
               {.directory = scratch.path() / "export", .config_json = "{}", .dtype = DType::bf16});
  const auto bits = widened(read_tensors(scratch.path() / "export").at("model.norm.weight"));
  EXPECT_EQ(bits[0], 0x3f800000U);
  EXPECT_EQ(bits[1], 0x3f820000U);
  EXPECT_EQ(bits[2], 0x3f810000U);
}

TEST(Exactness, AWeightThatTheDtypeCannotHoldIsNamedInsteadOfBecomingInfinite) {
  const ModelSpec spec = tiny_spec(true);
  const std::pair<DType, float> cases[] = {{DType::f16, 65520.0F}, {DType::bf16, 3.4e38F}};
  for (const auto& [dtype, value] : cases) {
    Slabs slabs(spec);
    const Parameter& weight = slabs.layout.blocks[2].at("down_proj.weight");
    slabs.store->write(2, weight, 5, std::vector<float>{value});
    ScratchDirectory scratch;
    const fs::path target = scratch.path() / "export";
    EXPECT_THAT(refusal([&, dtype = dtype] {
                  export_model(*slabs.store, {.directory = target, .config_json = "{}", .dtype = dtype});
                }),
                AllOf(HasSubstr("element 5 of model.layers.1.mlp.down_proj.weight"), HasSubstr("fp32")));
    EXPECT_TRUE(names_in(scratch.path()).empty());
    EXPECT_NO_THROW(
        export_model(*slabs.store, {.directory = target, .config_json = "{}", .dtype = DType::f32}));
  }
}

// --- the exported directory ---

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
    EXPECT_NO_THROW(io::ModelFiles(scratch_.path() / name)) << name;
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
