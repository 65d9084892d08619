// Weights between Hugging Face directories and slabs: nothing is guessed, nothing is rounded unasked.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "model/hf_config.hpp"
#include "model_files_fixture.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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
                    HasSubstr("model.layers.1.input_layernorm.weight: int16")));
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
  // Two ties, of which the first goes down (the master's upper half goes up), and one bit above a tie.
  slabs.store->write(slabs.layout.head(), norm, 0, std::vector<float>{0x1.01p0F, 0x1.03p0F, 0x1.010002p0F});
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

}  // namespace
}  // namespace layerstream::test
