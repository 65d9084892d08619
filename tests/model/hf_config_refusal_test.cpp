#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "hf_config_fixtures.hpp"
#include "model/hf_config.hpp"

namespace layerstream {
namespace {

using fixtures::replaced;
using fixtures::small;

std::string with(const char* more) {
  return small("LlamaForCausalLM", more);
}
std::string qwen(const char* more) {
  return small("Qwen2ForCausalLM", more);
}
std::string mistral(const char* more) {
  return small("MistralForCausalLM", more);
}
std::string instead(const char* from, const char* to) {
  return replaced(small("LlamaForCausalLM"), from, to);
}

/// A config that must be refused, and what the message must say: the key with its value, and the reason.
struct Refusal {
  const char* name;
  std::string text;
  std::vector<std::string> says;
};

class HfConfigRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(HfConfigRefusal, names_file_key_and_value) {
  const Refusal& refusal = GetParam();
  try {
    parse_hf_config(refusal.text, "models/x/config.json");
    FAIL() << "accepted: " << refusal.text;
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), exit_code::refused);
    EXPECT_THAT(error.what(), testing::StartsWith("models/x/config.json: "));
    for (const std::string& part : refusal.says) EXPECT_THAT(error.what(), testing::HasSubstr(part));
  }
}

std::string name_of_case(const testing::TestParamInfo<Refusal>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(
    Text, HfConfigRefusal,
    testing::Values(Refusal{"syntax", "{\"a\": }", {"not valid JSON", "line 1, column 7"}},
                    Refusal{"empty", "", {"not valid JSON"}},
                    Refusal{"utf8", "{\"a\": \"\xff\"}", {"not valid JSON"}},
                    Refusal{"not_an_object", "[1]", {"expected a JSON object, found array"}},
                    Refusal{"duplicate", with(R"("vocab_size": 7)"), {"key 'vocab_size' stands twice"}},
                    Refusal{"nested_duplicate",
                            with(R"("rope_scaling": {"factor": 1, "factor": 2})"),
                            {"key 'factor' stands twice"}}),
    name_of_case);

INSTANTIATE_TEST_SUITE_P(
    Family, HfConfigRefusal,
    testing::Values(Refusal{"architecture",
                            small("GemmaForCausalLM"),
                            {R"(architectures is ["GemmaForCausalLM"])",
                             "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
                             "Qwen3ForCausalLM"}},
                    Refusal{"no_language_head", small("LlamaModel"), {R"(architectures is ["LlamaModel"])"}},
                    Refusal{"two",
                            instead(R"(["LlamaForCausalLM"])", R"(["LlamaForCausalLM", "Qwen2ForCausalLM"])"),
                            {"architectures is", "expected one of"}},
                    Refusal{"not_a_list",
                            instead(R"(["LlamaForCausalLM"])", R"("LlamaForCausalLM")"),
                            {"architectures", "expected a list of strings"}},
                    Refusal{
                        "model_type",
                        instead(R"("architectures": ["LlamaForCausalLM"])", R"("model_type": "qwen3_moe")"),
                        {R"(model_type is "qwen3_moe")", "llama, mistral, qwen2, qwen3"}},
                    Refusal{"contradiction",
                            with(R"("model_type": "mistral")"),
                            {R"(model_type is "mistral")", "contradicts architectures LlamaForCausalLM"}},
                    Refusal{"neither",
                            instead(R"("architectures": ["LlamaForCausalLM"],)", ""),
                            {"architectures is missing", "expected one of"}}),
    name_of_case);

INSTANTIATE_TEST_SUITE_P(
    Sizes, HfConfigRefusal,
    testing::Values(
        Refusal{"vocab", instead(R"("vocab_size": 100,)", ""), {"vocab_size is missing"}},
        Refusal{"hidden", instead(R"("hidden_size": 64,)", ""), {"hidden_size is missing"}},
        Refusal{"intermediate", instead(R"("intermediate_size": 96,)", ""), {"intermediate_size is missing"}},
        Refusal{"layers", instead(R"("num_hidden_layers": 4,)", ""), {"num_hidden_layers is missing"}},
        Refusal{"heads", instead(R"("num_attention_heads": 4,)", ""), {"num_attention_heads is missing"}},
        Refusal{
            "null_size", instead(R"("vocab_size": 100)", R"("vocab_size": null)"), {"vocab_size is null"}},
        Refusal{"zero",
                instead(R"("vocab_size": 100)", R"("vocab_size": 0)"),
                {"vocab_size is 0", "expected a positive integer"}},
        Refusal{"negative", instead(R"("hidden_size": 64)", R"("hidden_size": -64)"), {"hidden_size is -64"}},
        Refusal{
            "fraction", instead(R"("hidden_size": 64)", R"("hidden_size": 64.5)"), {"hidden_size is 64.5"}},
        Refusal{"float_integer",
                instead(R"("hidden_size": 64)", R"("hidden_size": 64.0)"),
                {"hidden_size is 64.0"}},
        Refusal{
            "text", instead(R"("hidden_size": 64)", R"("hidden_size": "64")"), {R"(hidden_size is "64")"}},
        Refusal{"boolean",
                instead(R"("num_hidden_layers": 4)", R"("num_hidden_layers": true)"),
                {"num_hidden_layers is true"}},
        Refusal{"huge",
                instead(R"("vocab_size": 100)", R"("vocab_size": 18446744073709551615)"),
                {"vocab_size is 18446744073709551615", "at most"}},
        Refusal{"positions",
                instead(R"("max_position_embeddings": 512)", R"("max_position_embeddings": 0)"),
                {"max_position_embeddings is 0"}},
        Refusal{"kv_heads",
                instead(R"("num_key_value_heads": 2)", R"("num_key_value_heads": 3)"),
                {"num_key_value_heads is 3", "num_attention_heads 4"}},
        Refusal{"more_kv_heads",
                instead(R"("num_key_value_heads": 2)", R"("num_key_value_heads": 8)"),
                {"num_key_value_heads is 8"}},
        Refusal{"default_kv_heads",
                replaced(qwen(""), R"("num_key_value_heads": 2,)", ""),
                {"num_key_value_heads is missing", "not a multiple of 32"}},
        Refusal{"odd_head_dim", with(R"("head_dim": 15)"), {"head_dim is 15", "even"}},
        Refusal{"odd_derived_head_dim",
                instead(R"("hidden_size": 64)", R"("hidden_size": 60)"),
                {"head_dim is missing", "even head_dim, got 15"}},
        Refusal{"indivisible_hidden",
                instead(R"("hidden_size": 64)", R"("hidden_size": 66)"),
                {"hidden_size is 66", "num_attention_heads 4", "head_dim"}},
        Refusal{"eps", with(R"("rms_norm_eps": 0.0)"), {"rms_norm_eps is 0.0"}},
        Refusal{"tie", with(R"("tie_word_embeddings": 1)"), {"tie_word_embeddings is 1", "true or false"}},
        Refusal{"initializer", with(R"("initializer_range": -1.0)"), {"initializer_range is -1.0"}}),
    name_of_case);

INSTANTIATE_TEST_SUITE_P(
    Functions, HfConfigRefusal,
    testing::Values(
        Refusal{"activation", with(R"("hidden_act": "gelu")"), {R"(hidden_act is "gelu")", "only silu"}},
        Refusal{
            "dropout", with(R"("attention_dropout": 0.1)"), {"attention_dropout is 0.1", "set it to 0.0"}},
        Refusal{"quantized",
                with(R"("quantization_config": {"bits": 4})"),
                {R"(quantization_config is {"bits":4})", "unquantized"}},
        Refusal{"per_layer",
                with(R"("per_layer_config": {"0": {"num_key_value_heads": 1}})"),
                {"per_layer_config"}},
        Refusal{"bidirectional", with(R"("is_causal": false)"), {"is_causal is false"}},
        Refusal{"mrope", qwen(R"("use_mrope": true)"), {"use_mrope is true"}},
        Refusal{
            "partial_rotation", with(R"("partial_rotary_factor": 0.5)"), {"partial_rotary_factor is 0.5"}},
        Refusal{"dtype",
                with(R"("torch_dtype": "float8_e4m3fn")"),
                {R"(torch_dtype is "float8_e4m3fn")", "float32, bfloat16 or float16"}},
        Refusal{"new_dtype", with(R"("dtype": "auto")"), {R"(: dtype is "auto")"}},
        Refusal{"two_dtypes",
                with(R"("dtype": "float16", "torch_dtype": "bfloat16")"),
                {R"(torch_dtype is "bfloat16")", "contradicts dtype float16"}},
        Refusal{"zero_window", mistral(R"("sliding_window": 0)"), {"sliding_window is 0"}},
        Refusal{"mistral_layer_types",
                mistral(R"("sliding_window": 7, "layer_types": ["full_attention",
            "full_attention", "full_attention", "sliding_attention"])"),
                {"layer_types is", "contradicts sliding_window"}},
        Refusal{"alternating",
                qwen(R"("use_sliding_window": true, "layer_types": ["full_attention",
            "sliding_attention", "full_attention", "sliding_attention"])"),
                {"layer_types is", "layer 2 has full attention"}},
        Refusal{"layer_type",
                qwen(R"("layer_types": ["full_attention", "full_attention", "linear_attention",
            "full_attention"])"),
                {"unknown layer type 'linear_attention'"}},
        Refusal{"few_layer_types",
                qwen(R"("layer_types": ["full_attention"])"),
                {"layer_types is", "each of the 4 layers, found 1"}},
        Refusal{"window_switched_off",
                qwen(R"("layer_types": ["sliding_attention", "sliding_attention",
            "sliding_attention", "sliding_attention"])"),
                {"layer_types is", "use_sliding_window"}},
        Refusal{"window_layers",
                qwen(R"("use_sliding_window": true, "max_window_layers": -1)"),
                {"max_window_layers is -1"}}),
    name_of_case);

INSTANTIATE_TEST_SUITE_P(
    Rope, HfConfigRefusal,
    testing::Values(
        Refusal{"unknown",
                with(R"("rope_scaling": {"type": "ntk", "factor": 2})"),
                {R"(rope_scaling.type is "ntk")", "default, linear, dynamic, llama3, yarn, longrope"}},
        Refusal{"su",
                with(R"("rope_parameters": {"rope_type": "su"})"),
                {R"(rope_parameters.rope_type is "su")", "old name of longrope"}},
        Refusal{"two_types",
                with(R"("rope_scaling": {"type": "mrope", "rope_type": "default"})"),
                {R"(rope_scaling.type is "mrope")", "contradicts rope_type 'default'"}},
        Refusal{"unknown_key",
                with(R"("rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]})"),
                {"rope_scaling.mrope_section is [1]", "unknown rope key"}},
        Refusal{"not_an_object", with(R"("rope_scaling": "linear")"), {R"(rope_scaling is "linear")"}},
        Refusal{"theta", with(R"("rope_theta": -1.0)"), {"rope_theta is -1.0"}},
        Refusal{"two_thetas",
                with(R"("rope_theta": 10000, "rope_parameters": {"rope_theta": 500000.0})"),
                {"rope_parameters.rope_theta is 500000.0", "contradicts the top-level rope_theta 10000"}},
        Refusal{"two_spellings",
                with(R"("rope_scaling": {"type": "linear", "factor": 2},
            "rope_parameters": {"rope_type": "linear", "factor": 4})"),
                {"rope_scaling is", "contradicts rope_parameters"}},
        Refusal{"linear",
                with(R"("rope_scaling": {"type": "linear"})"),
                {"rope_scaling.factor is missing", "'linear' needs it"}},
        Refusal{"small_factor",
                with(R"("rope_scaling": {"type": "dynamic", "factor": 0.5})"),
                {"rope_scaling.factor is 0.5", "at least 1"}},
        Refusal{"llama3_length",
                with(R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1,
            "high_freq_factor": 4})"),
                {"rope_scaling.original_max_position_embeddings is missing", "'llama3' needs it"}},
        Refusal{"llama3_low",
                with(R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4,
            "original_max_position_embeddings": 128})"),
                {"rope_scaling.low_freq_factor is missing"}},
        Refusal{"llama3_order",
                with(R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4,
            "high_freq_factor": 4, "original_max_position_embeddings": 128})"),
                {"rope_scaling.high_freq_factor is 4", "greater than low_freq_factor 4"}},
        Refusal{
            "yarn_factor", with(R"("rope_scaling": {"type": "yarn"})"), {"rope_scaling.factor is missing"}},
        Refusal{"yarn_betas",
                with(R"("rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2})"),
                {"rope_scaling.beta_fast is 1", "beta_slow 2"}},
        Refusal{"two_lengths",
                with(R"("original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn",
            "factor": 8.0, "original_max_position_embeddings": 32})"),
                {"rope_scaling.original_max_position_embeddings is 32", "contradicts the top-level"}},
        Refusal{"longrope_missing",
                with(R"("rope_scaling": {"type": "longrope", "factor": 2,
            "short_factor": [1, 1, 1, 1, 1, 1, 1, 1]})"),
                {"rope_scaling.long_factor is missing"}},
        Refusal{"longrope_length",
                with(R"("rope_scaling": {"type": "longrope", "factor": 2, "short_factor": [1],
            "long_factor": [1]})"),
                {"rope_scaling.short_factor is [1]", "head_dim / 2 = 8 numbers, found 1"}},
        Refusal{"longrope_values",
                with(R"("rope_scaling": {"type": "longrope", "factor": 2, "short_factor": [1, "2"],
            "long_factor": [1]})"),
                {"rope_scaling.short_factor is", "list of positive numbers"}},
        Refusal{"rope_partial",
                with(R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5})"),
                {"rope_parameters.partial_rotary_factor is 0.5"}},
        Refusal{"beside_nested",
                with(R"("rope_parameters": {"full_attention": {}, "rope_theta": 1000})"),
                {"rope_parameters.rope_theta is 1000", "beside parameters per layer type"}}),
    name_of_case);

}  // namespace
}  // namespace layerstream
