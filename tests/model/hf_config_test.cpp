#include "model/hf_config.hpp"

#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "hf_config_fixtures.hpp"
#include "model/layout.hpp"
#include "tests/support/scratch_directory.hpp"

namespace layerstream {
namespace {

using fixtures::replaced;
using fixtures::small;

ModelSpec parse(const std::string& text) {
  return parse_hf_config(text, "config.json");
}

// Parameter counts: sum(p.numel() for p in model.parameters()) of the transformers 5.24 models of these
// configs, built on the meta device.
TEST(HfConfig, published_models_have_their_known_number_of_parameters) {
  EXPECT_EQ(make_layout(parse(fixtures::qwen2_5_7b)).num_parameters(), 7'615'616'512);
  EXPECT_EQ(make_layout(parse(fixtures::llama_3_1_8b)).num_parameters(), 8'030'261'248);
  EXPECT_EQ(make_layout(parse(fixtures::mistral_7b_v0_1)).num_parameters(), 7'241'732'096);
  EXPECT_EQ(make_layout(parse(fixtures::qwen3_8b)).num_parameters(), 8'190'735'360);
}

// Qwen2.5-0.5B, tied: 494,032,768 by the same means.
TEST(HfConfig, tied_embeddings_are_counted_once) {
  const std::string text = R"({"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
      "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
      "max_position_embeddings": 32768, "tie_word_embeddings": true})";
  const ModelSpec spec = parse(text);
  EXPECT_TRUE(spec.tie_word_embeddings);
  EXPECT_EQ(make_layout(spec).num_parameters(), 494'032'768);
}

TEST(HfConfig, qwen2_has_biases_on_query_key_and_value_only) {
  const ModelSpec spec = parse(fixtures::qwen2_5_7b);
  EXPECT_EQ(spec.family, Family::qwen2);
  EXPECT_EQ(spec.head_dim, 128);
  EXPECT_EQ(spec.num_key_value_heads, 4);
  EXPECT_TRUE(spec.qkv_bias);
  EXPECT_FALSE(spec.output_bias);
  EXPECT_FALSE(spec.mlp_bias);
  EXPECT_FALSE(spec.qk_norm);
  EXPECT_EQ(spec.sliding_window, 0);
  EXPECT_EQ(spec.rope.theta, 1e6);
  EXPECT_EQ(spec.rms_norm_eps, 1e-6);
  EXPECT_EQ(spec.dtype, "bfloat16");
}

TEST(HfConfig, llama_attention_bias_is_on_the_output_projection_too) {
  const ModelSpec plain = parse(fixtures::llama_3_1_8b);
  EXPECT_EQ(plain.family, Family::llama);
  EXPECT_EQ(plain.rms_norm_eps, 1e-5);
  EXPECT_FALSE(plain.qkv_bias || plain.output_bias || plain.mlp_bias || plain.qk_norm);

  const ModelSpec biased = parse(small("LlamaForCausalLM", R"("attention_bias": true, "mlp_bias": true)"));
  EXPECT_TRUE(biased.qkv_bias && biased.output_bias && biased.mlp_bias);
}

TEST(HfConfig, qwen3_normalises_heads_and_takes_attention_bias) {
  const ModelSpec plain = parse(fixtures::qwen3_8b);
  EXPECT_EQ(plain.family, Family::qwen3);
  EXPECT_TRUE(plain.qk_norm);
  EXPECT_FALSE(plain.qkv_bias || plain.output_bias);
  const ModelSpec biased = parse(small("Qwen3ForCausalLM", R"("attention_bias": true)"));
  EXPECT_TRUE(biased.qkv_bias && biased.output_bias);
  EXPECT_FALSE(biased.mlp_bias);
}

TEST(HfConfig, mistral_has_no_biases_and_a_window_in_every_layer) {
  const ModelSpec spec =
      parse(replaced(fixtures::mistral_7b_v0_1, "\"bos_token_id\": 1", "\"attention_bias\": true"));
  EXPECT_EQ(spec.family, Family::mistral);
  EXPECT_FALSE(spec.qkv_bias || spec.output_bias || spec.mlp_bias);
  EXPECT_EQ(spec.window_of(0), 4096);
  EXPECT_EQ(spec.window_of(31), 4096);
}

TEST(HfConfig, mistral_without_window) {
  EXPECT_EQ(parse(small("MistralForCausalLM", R"("sliding_window": null)")).sliding_window, 0);
  EXPECT_EQ(parse(small("MistralForCausalLM", R"("sliding_window": 7)")).sliding_window, 7);
  // MistralConfig's class default.
  EXPECT_EQ(parse(small("MistralForCausalLM")).sliding_window, 4096);
}

TEST(HfConfig, llama_ignores_a_sliding_window) {
  EXPECT_EQ(parse(small("LlamaForCausalLM", R"("sliding_window": 7)")).sliding_window, 0);
}

TEST(HfConfig, qwen_window_needs_its_switch_and_starts_at_max_window_layers) {
  for (const char* architecture : {"Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    const auto with = [&](const char* more) { return parse(small(architecture, more)); };
    EXPECT_EQ(with(R"("sliding_window": 7, "max_window_layers": 0)").sliding_window, 0);
    EXPECT_EQ(
        with(R"("use_sliding_window": false, "sliding_window": 7, "max_window_layers": 0)").sliding_window,
        0);
    EXPECT_EQ(with(R"("use_sliding_window": true, "sliding_window": null)").sliding_window, 0);
    // The class default of max_window_layers is 28: none of the four layers has a window.
    EXPECT_EQ(with(R"("use_sliding_window": true, "sliding_window": 7)").sliding_window, 0);

    const ModelSpec late = with(R"("use_sliding_window": true, "sliding_window": 7, "max_window_layers": 3)");
    EXPECT_EQ(late.window_of(2), 0);
    EXPECT_EQ(late.window_of(3), 7);
    const ModelSpec all = with(R"("use_sliding_window": true, "sliding_window": 7, "max_window_layers": 0)");
    EXPECT_EQ(all.window_of(0), 7);
  }
}

TEST(HfConfig, layer_types_override_max_window_layers) {
  const ModelSpec spec = parse(small("Qwen2ForCausalLM", R"("use_sliding_window": true, "sliding_window": 7,
      "max_window_layers": 4,
      "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"])"));
  EXPECT_EQ(spec.window_of(0), 0);
  EXPECT_EQ(spec.window_of(1), 7);
  const ModelSpec full = parse(small("Qwen2ForCausalLM", R"("use_sliding_window": true, "sliding_window": 7,
      "max_window_layers": 0,
      "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"])"));
  EXPECT_EQ(full.sliding_window, 0);
}

TEST(HfConfig, head_dim_is_derived_unless_given) {
  EXPECT_EQ(parse(small("LlamaForCausalLM")).head_dim, 16);
  EXPECT_EQ(parse(small("LlamaForCausalLM", R"("head_dim": null)")).head_dim, 16);
  for (const char* architecture :
       {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    const ModelSpec spec = parse(small(architecture, R"("head_dim": 32)"));
    EXPECT_EQ(spec.head_dim, 32);
    EXPECT_EQ(spec.query_size(), 128);
    EXPECT_EQ(spec.key_value_size(), 64);
  }
  // Qwen3Config's class default is a number, whatever the hidden size.
  EXPECT_EQ(parse(small("Qwen3ForCausalLM")).head_dim, 128);
}

TEST(HfConfig, absent_key_value_heads_take_the_class_default_and_null_means_all_heads) {
  const auto heads = [](const char* architecture, const char* heads_text) {
    std::string text =
        replaced(small(architecture), R"("num_attention_heads": 4)", R"("num_attention_heads": 64)");
    return parse(replaced(text, R"("num_key_value_heads": 2,)", heads_text)).num_key_value_heads;
  };
  EXPECT_EQ(heads("LlamaForCausalLM", R"("head_dim": 2,)"), 64);
  EXPECT_EQ(heads("MistralForCausalLM", R"("head_dim": 2,)"), 8);
  EXPECT_EQ(heads("Qwen2ForCausalLM", R"("head_dim": 2,)"), 32);
  EXPECT_EQ(heads("Qwen3ForCausalLM", ""), 32);
  EXPECT_EQ(heads("MistralForCausalLM", R"("head_dim": 2, "num_key_value_heads": null,)"), 64);
}

TEST(HfConfig, other_absent_keys_take_the_class_defaults) {
  const std::string text = replaced(small("LlamaForCausalLM"), R"(, "max_position_embeddings": 512)", "");
  const ModelSpec spec = parse(text);
  EXPECT_EQ(spec.max_position_embeddings, 2048);
  EXPECT_EQ(spec.rms_norm_eps, 1e-6);
  EXPECT_EQ(spec.initializer_range, 0.02);
  EXPECT_FALSE(spec.tie_word_embeddings);
  EXPECT_EQ(spec.rope, RopeSpec{});
  EXPECT_EQ(spec.dtype, "float32");
  const auto positions = [&](const char* architecture) {
    return parse(replaced(text, "LlamaForCausalLM", architecture)).max_position_embeddings;
  };
  EXPECT_EQ(positions("MistralForCausalLM"), 131072);
  EXPECT_EQ(positions("Qwen2ForCausalLM"), 32768);
  EXPECT_EQ(positions("Qwen3ForCausalLM"), 32768);
}

TEST(HfConfig, the_family_follows_from_architectures_or_model_type) {
  const std::string text = small("Qwen3ForCausalLM");
  EXPECT_EQ(parse(text).family, Family::qwen3);
  const std::string by_type =
      replaced(text, R"("architectures": ["Qwen3ForCausalLM"])", R"("model_type": "mistral")");
  EXPECT_EQ(parse(by_type).family, Family::mistral);
  EXPECT_EQ(parse(replaced(by_type, "{", R"({"architectures": null, )")).family, Family::mistral);
}

TEST(HfConfig, both_dtype_spellings) {
  EXPECT_EQ(parse(small("LlamaForCausalLM", R"("torch_dtype": "float16")")).dtype, "float16");
  EXPECT_EQ(parse(small("LlamaForCausalLM", R"("dtype": "bfloat16")")).dtype, "bfloat16");
  EXPECT_EQ(parse(small("LlamaForCausalLM", R"("dtype": "bfloat16", "torch_dtype": "bfloat16")")).dtype,
            "bfloat16");
  EXPECT_EQ(parse(small("LlamaForCausalLM", R"("torch_dtype": null)")).dtype, "float32");
}

// The golden models' configs were written by transformers itself.
TEST(HfConfig, loads_a_directory_or_a_file) {
  const char* data = std::getenv("LAYERSTREAM_TEST_DATA");
  ASSERT_NE(data, nullptr);
  const auto golden = std::filesystem::path(data) / "golden";
  const ModelSpec qwen3 = load_hf_config(golden / "qwen3_qk_norm");
  EXPECT_EQ(qwen3.family, Family::qwen3);
  EXPECT_NE(qwen3.head_dim, qwen3.hidden_size / qwen3.num_attention_heads);
  const ModelSpec mistral = load_hf_config(golden / "mistral_window" / "config.json");
  EXPECT_EQ(mistral.family, Family::mistral);
  EXPECT_GT(mistral.sliding_window, 0);
  EXPECT_EQ(read_hf_config(golden / "mistral_window").path,
            (golden / "mistral_window" / "config.json").string());
  EXPECT_EQ(load_hf_config(golden / "llama_llama3").rope.type, RopeType::llama3);
}

TEST(HfConfig, end_tokens_are_those_of_the_generation_config_or_else_of_the_config) {
  const test::ScratchDirectory directory;
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(directory.path() / name) << text;
  };
  const auto ends = [&] { return read_end_tokens(directory.path()); };
  EXPECT_TRUE(ends().empty());
  write("config.json", R"({"eos_token_id": null})");
  EXPECT_TRUE(ends().empty());
  write("config.json", R"({"eos_token_id": 2})");
  EXPECT_EQ(ends(), std::vector<std::int32_t>{2});
  write("generation_config.json", R"({"temperature": 0.7})");
  EXPECT_EQ(ends(), std::vector<std::int32_t>{2});
  write("generation_config.json", R"({"eos_token_id": []})");
  EXPECT_EQ(ends(), std::vector<std::int32_t>{2});
  write("generation_config.json", R"({"eos_token_id": [128001, 128009]})");
  EXPECT_EQ(ends(), (std::vector<std::int32_t>{128001, 128009}));
  for (const char* value : {"\"</s>\"", "[1, -1]", "4294967296", "1.5"}) {
    write("generation_config.json", fmt::format(R"({{"eos_token_id": {}}})", value));
    EXPECT_THAT(ends, testing::ThrowsMessage<FileError>(testing::AllOf(
                          testing::HasSubstr("generation_config.json"), testing::HasSubstr("eos_token_id"))));
  }
}

TEST(HfConfig, a_directory_without_config_is_refused) {
  const char* data = std::getenv("LAYERSTREAM_TEST_DATA");
  ASSERT_NE(data, nullptr);
  const auto load = [&] { load_hf_config(data); };
  EXPECT_THAT(load,
              testing::ThrowsMessage<FileError>(testing::AllOf(
                  testing::HasSubstr("tests/config.json: no such file"), testing::HasSubstr("expected"))));
}

TEST(HfConfigExport, changes_the_dtype_alone_in_the_spelling_that_stood_there) {
  const auto exported = [](const std::string& text) { return export_hf_config(text, DType::f32); };
  EXPECT_EQ(
      exported(
          R"({"zeta": [1, {"b": 1e-05, "a": null}], "torch_dtype": "bfloat16", "architectures": ["X"]})"),
      R"({
  "zeta": [
    1,
    {
      "b": 1e-05,
      "a": null
    }
  ],
  "torch_dtype": "float32",
  "architectures": [
    "X"
  ]
}
)");
  EXPECT_EQ(exported(R"({"dtype": "bfloat16", "a": 1})"), "{\n  \"dtype\": \"float32\",\n  \"a\": 1\n}\n");
  EXPECT_EQ(exported(R"({"dtype": "float16", "torch_dtype": "float16"})"),
            "{\n  \"dtype\": \"float32\",\n  \"torch_dtype\": \"float32\"\n}\n");
  EXPECT_EQ(exported(R"({"a": 1})"), "{\n  \"a\": 1,\n  \"torch_dtype\": \"float32\"\n}\n");
  EXPECT_EQ(exported(R"({"rope_parameters": null})"),
            "{\n  \"rope_parameters\": null,\n  \"dtype\": \"float32\"\n}\n");
}

TEST(HfConfigExport, an_exported_config_reads_back_as_the_same_model) {
  for (const std::string& text :
       {fixtures::qwen2_5_7b, fixtures::llama_3_1_8b, fixtures::mistral_7b_v0_1, fixtures::qwen3_8b}) {
    const ModelSpec before = parse(text);
    const std::string exported = export_hf_config(text, DType::f16);
    const ModelSpec after = parse(exported);
    EXPECT_EQ(after.dtype, "float16");
    EXPECT_EQ(after.family, before.family);
    EXPECT_EQ(after.rope, before.rope);
    EXPECT_EQ(after.rms_norm_eps, before.rms_norm_eps);
    EXPECT_EQ(make_layout(after).num_parameters(), make_layout(before).num_parameters());
    EXPECT_EQ(export_hf_config(exported, DType::f16), exported);
  }
}

TEST(HfConfigExport, keeps_large_integers_and_non_ascii_text) {
  EXPECT_EQ(
      export_hf_config("{\"dtype\": \"float16\", \"n\": 9007199254740993, \"s\": \"\xc3\xa9\"}", DType::bf16),
      "{\n  \"dtype\": \"bfloat16\",\n  \"n\": 9007199254740993,\n  \"s\": \"\\u00e9\"\n}\n");
}

}  // namespace
}  // namespace layerstream
