#include <gmock/gmock.h>

#include "hf_config_fixtures.hpp"
#include "model/hf_config.hpp"

namespace layerstream {
namespace {

using fixtures::small;

RopeSpec rope_of(const std::string& more, const char* architecture = "LlamaForCausalLM") {
  return parse_hf_config(small(architecture, more), "config.json").rope;
}

TEST(HfConfigRope, theta_in_either_spelling) {
  EXPECT_EQ(rope_of("").theta, 10000.0);
  EXPECT_EQ(rope_of(R"("rope_theta": 500000)").theta, 500000.0);
  EXPECT_EQ(rope_of(R"("rope_theta": 500000.0, "rope_scaling": null)").theta, 500000.0);
  EXPECT_EQ(rope_of(R"("rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"})").theta,
            500000.0);
  EXPECT_EQ(rope_of(R"("rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000, "rope_type": "default"})")
                .theta,
            500000.0);
  EXPECT_EQ(rope_of(R"("rope_theta": 5e5, "rope_parameters": {"rope_type": "default"})").theta, 500000.0);
  EXPECT_EQ(rope_of(R"("rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2})").theta, 500000.0);
}

TEST(HfConfigRope, an_empty_object_means_no_scaling) {
  EXPECT_EQ(rope_of(R"("rope_scaling": {})"), RopeSpec{});
  EXPECT_EQ(rope_of(R"("rope_scaling": {}, "rope_parameters": {})"), RopeSpec{});
}

/// One rope type: its keys without theta and type, and what they mean.
struct RopeCase {
  const char* type;
  const char* keys;
  RopeSpec expected;
};

class HfConfigRopeType : public testing::TestWithParam<RopeCase> {};

TEST_P(HfConfigRopeType, reads_the_same_in_all_spellings) {
  const RopeCase& parameter = GetParam();
  const std::string type = parameter.type;
  const std::string keys = *parameter.keys == '\0' ? "" : std::string(", ") + parameter.keys;
  const std::string oldest = R"("rope_theta": 7000, "rope_scaling": {"type": ")" + type + "\"" + keys + "}";
  const std::string old = R"("rope_theta": 7000, "rope_scaling": {"rope_type": ")" + type + "\"" + keys + "}";
  const std::string both = R"("rope_theta": 7000, "rope_scaling": {"rope_type": ")" + type +
                           R"(", "type": ")" + type + "\"" + keys + "}";
  const std::string flat = R"({"rope_theta": 7000, "rope_type": ")" + type + "\"" + keys + "}";
  const std::string current = R"("rope_parameters": )" + flat;
  const std::string nested = R"("rope_parameters": {"full_attention": )" + flat + "}";
  for (const std::string& text : {oldest, old, both, current, nested}) {
    EXPECT_EQ(rope_of(text), parameter.expected) << text;
  }
  EXPECT_EQ(rope_of(both + ", " + current), parameter.expected);
}

// Small configs have head_dim 16: longrope takes 8 numbers.
INSTANTIATE_TEST_SUITE_P(
    All, HfConfigRopeType,
    testing::Values(
        RopeCase{"default", "", {.type = RopeType::standard, .theta = 7000}},
        RopeCase{"linear", R"("factor": 2)", {.type = RopeType::linear, .theta = 7000, .factor = 2.0}},
        RopeCase{"dynamic", R"("factor": 2.5)", {.type = RopeType::dynamic, .theta = 7000, .factor = 2.5}},
        RopeCase{"llama3",
                 R"("factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
                    "original_max_position_embeddings": 128)",
                 {.type = RopeType::llama3,
                  .theta = 7000,
                  .factor = 8.0,
                  .original_max_position_embeddings = 128,
                  .low_freq_factor = 1.5,
                  .high_freq_factor = 3.0}},
        RopeCase{
            "yarn",
            R"("factor": 4.0, "original_max_position_embeddings": 128, "finetuned": true)",
            {.type = RopeType::yarn, .theta = 7000, .factor = 4.0, .original_max_position_embeddings = 128}},
        RopeCase{"yarn",
                 R"("factor": null, "original_max_position_embeddings": 128, "beta_fast": 20, "beta_slow": 2,
                    "mscale": 0.7, "mscale_all_dim": 0.8, "attention_factor": 1.1, "truncate": false)",
                 {.type = RopeType::yarn,
                  .theta = 7000,
                  .factor = RopeSpec{}.factor,
                  .original_max_position_embeddings = 128,
                  .beta_fast = 20,
                  .beta_slow = 2,
                  .attention_factor = 1.1,
                  .mscale = 0.7,
                  .mscale_all_dim = 0.8,
                  .truncate = false}},
        RopeCase{"longrope",
                 R"("factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.2,
                    "short_factor": [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [2, 3, 4, 5, 6, 7, 8, 9])",
                 {.type = RopeType::longrope,
                  .theta = 7000,
                  .factor = 4.0,
                  .original_max_position_embeddings = 128,
                  .attention_factor = 1.2,
                  .short_factor = {1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7},
                  .long_factor = {2, 3, 4, 5, 6, 7, 8, 9}}}),
    [](const auto& info) { return std::to_string(info.index) + "_" + info.param.type; });

TEST(HfConfigRope, the_original_length_may_stand_at_the_top) {
  const RopeSpec rope =
      rope_of(R"("original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 8.0})");
  EXPECT_EQ(rope.original_max_position_embeddings, 64);
}

TEST(HfConfigRope, nested_parameters_must_agree_for_the_layer_types_that_occur) {
  const std::string window = R"("use_sliding_window": true, "sliding_window": 7, "max_window_layers": 2, )";
  const std::string same =
      R"("rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9000},
      "sliding_attention": {"type": "default", "rope_theta": 9000.0}})";
  EXPECT_EQ(rope_of(window + same, "Qwen2ForCausalLM").theta, 9000.0);

  const std::string different =
      R"("rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9000},
      "sliding_attention": {"rope_type": "default", "rope_theta": 8000}})";
  const auto refused = [&] { rope_of(window + different, "Qwen2ForCausalLM"); };
  EXPECT_THAT(refused, testing::ThrowsMessage<FileError>(
                           testing::AllOf(testing::HasSubstr("rope_parameters.sliding_attention"),
                                          testing::HasSubstr("differs from that of the other layers"))));
  // Without a window no layer uses the second set.
  EXPECT_EQ(rope_of(different, "Qwen2ForCausalLM").theta, 9000.0);

  const std::string missing = R"("rope_parameters": {"full_attention": {"rope_type": "default"}})";
  const auto incomplete = [&] { rope_of(window + missing, "Qwen2ForCausalLM"); };
  EXPECT_THAT(incomplete, testing::ThrowsMessage<FileError>(
                              testing::HasSubstr("rope_parameters.sliding_attention is missing")));
}

}  // namespace
}  // namespace layerstream
