#include "engine/parameter_groups.hpp"

#include <gmock/gmock.h>

#include "run_fixture.hpp"

namespace layerstream {
namespace {

using test::RunFiles;
using test::TestRun;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

ModelLayout layout() {
  return make_layout(parse_hf_config(test::small_model_json(false).dump(), "config.json"));
}

TEST(WeightDecayRule, IsAPatternAndANumber) {
  const auto rule = parse_weight_decay_rule("*.bias=0.25");
  ASSERT_TRUE(rule);
  EXPECT_EQ(rule->decay, 0.25);
  EXPECT_TRUE(rule->fits("model.layers.3.self_attn.q_proj.bias"));
  EXPECT_FALSE(rule->fits("model.layers.3.self_attn.q_proj.bias.more"));
  for (const char* const text : {"", "=0.1", "*.bias", "*.bias=", "*.bias=-1", "*.bias=nan", "*.bias=much"}) {
    EXPECT_FALSE(parse_weight_decay_rule(text)) << text;
  }
}

TEST(ParameterGroups, WithoutRulesMatricesAreDecayedAndVectorsNot) {
  const ModelLayout model = layout();
  const ParameterGroups groups(model, WeightDecay(model, {}));
  const BlockLayout& block = model.blocks[1];
  EXPECT_THAT(groups.ranges(1, 0, block.num_elements, 0.1),
              ElementsAre(UpdateRange{block.num_matrix_elements, 0.1}, UpdateRange{block.num_elements, 0.0}));
  // Nothing to tell apart.
  EXPECT_THAT(groups.ranges(1, 0, block.num_elements, 0.0),
              ElementsAre(UpdateRange{block.num_elements, 0.0}));
  // A piece across the border, counted from its own start.
  EXPECT_THAT(groups.ranges(1, block.num_matrix_elements - 5, 8, 0.1),
              ElementsAre(UpdateRange{5, 0.1}, UpdateRange{8, 0.0}));
  EXPECT_THAT(groups.ranges(1, 3, 8, 0.1), ElementsAre(UpdateRange{8, 0.1}));
}

TEST(ParameterGroups, TheLastRuleThatFitsCounts) {
  const ModelLayout model = layout();
  const ParameterGroups groups(
      model, WeightDecay(model, {"model.layers.1.*=0.5", "*norm*=0.25", "*.down_proj.weight=0"}));
  for (int block = 0; block < model.num_blocks(); ++block) {
    for (const Parameter& parameter : model.blocks[static_cast<std::size_t>(block)].parameters) {
      double expected = parameter.is_matrix ? 0.1 : 0.0;
      if (parameter.name.find("layers.1.") != std::string::npos) expected = 0.5;
      if (parameter.name.find("norm") != std::string::npos) expected = 0.25;
      if (parameter.name.ends_with(".down_proj.weight")) expected = 0.0;
      EXPECT_THAT(groups.ranges(block, parameter.offset, parameter.numel(), 0.1),
                  ElementsAre(UpdateRange{parameter.numel(), expected}))
          << parameter.name;
    }
  }
  std::int64_t all = 0;
  for (const auto& [value, count] : groups.parameters_by_decay(model, 0.1)) all += count;
  EXPECT_EQ(all, model.num_parameters());
  EXPECT_THAT(ParameterGroups(model, WeightDecay(model, {"*=0.5"})).parameters_by_decay(model, 0.1),
              ElementsAre(Pair(0.5, model.num_parameters())));
}

/// One step with a rate of `lr`, by the host's threads or the device.
std::vector<std::vector<float>> weights_after_a_step(RunFiles& files, const std::vector<std::string>& rules,
                                                     double decay, double device_share) {
  RunConfig config = files.config();
  config.output_dir = files.path(fmt::format("out-{}-{}-{}", rules.size(), decay, device_share)).string();
  config.warmup_steps = 0;
  config.weight_decay = decay;
  config.weight_decay_rules = rules;
  config.optimizer_device_share = device_share;
  TestRun run(config);
  run->step();
  run->engine().apply_pending();
  const ParameterStore& store = run->engine().parameters();
  std::vector<std::vector<float>> weights;
  for (int block = 0; block < store.layout().num_blocks(); ++block) {
    for (const Parameter& parameter : store.layout().blocks[static_cast<std::size_t>(block)].parameters) {
      weights.emplace_back(static_cast<std::size_t>(parameter.numel()));
      store.read(block, parameter, 0, weights.back());
    }
  }
  return weights;
}

TEST(ParameterGroups, RulesReachTheUpdateOfEitherEngine) {
  RunFiles files;
  const ModelLayout model = make_layout(parse_hf_config(test::small_model_json().dump(), "config.json"));
  std::vector<const Parameter*> parameters;
  for (const BlockLayout& block : model.blocks) {
    for (const Parameter& parameter : block.parameters) parameters.push_back(&parameter);
  }
  const auto none = weights_after_a_step(files, {}, 0.0, 0.0);
  const auto all = weights_after_a_step(files, {"*=0.5"}, 0.0, 0.0);
  const auto some = weights_after_a_step(files, {"*k_proj*=0.5", "*norm*=0.5"}, 0.0, 0.0);
  for (const double share : {0.6, 1.0}) {
    EXPECT_EQ(weights_after_a_step(files, {"*k_proj*=0.5", "*norm*=0.5"}, 0.0, share), some) << share;
  }
  ASSERT_EQ(some.size(), parameters.size());
  for (std::size_t i = 0; i < some.size(); ++i) {
    const std::string& name = parameters[i]->name;
    const bool ruled = name.find("k_proj") != std::string::npos || name.find("norm") != std::string::npos;
    EXPECT_EQ(some[i], ruled ? all[i] : none[i]) << name;
    EXPECT_NE(all[i], none[i]) << name;
  }
}

TEST(ParameterGroups, TheBannerTellsTheGroups) {
  RunFiles files;
  RunConfig config = files.config();
  config.weight_decay_rules = {"*embed_tokens*=0"};
  EXPECT_THAT(TestRun(config).log(), HasSubstr("weight decay: 0 of 8.59k parameters, 0.1 of "));
}

}  // namespace
}  // namespace layerstream
