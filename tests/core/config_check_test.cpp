// What check_config and require_keys refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/config.hpp"
#include "core/error.hpp"

namespace layerstream {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

RunConfig valid_run() {
  RunConfig run;
  run.config_name = "model";
  return run;
}

std::string check_refusal(const RunConfig& run, const ConfigOrigins& origins = {}) {
  try {
    check_config(run, origins);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(CheckConfig, AcceptsTheDefaultsWithAModel) {
  EXPECT_EQ(check_refusal(valid_run()), "");
}

TEST(CheckConfig, WantsExactlyOneModel) {
  EXPECT_THAT(check_refusal(RunConfig{}), AllOf(HasSubstr("model_name_or_path"), HasSubstr("config_name")));
  RunConfig both = valid_run();
  both.model_name_or_path = "weights";
  EXPECT_THAT(check_refusal(both, {{"config_name", "run.yaml:3"}}),
              AllOf(HasSubstr("model_name_or_path = weights (default)"),
                    HasSubstr("config_name = model (run.yaml:3)"), HasSubstr("exclude each other")));
}

TEST(CheckConfig, ImmediateUpdateExcludesClipping) {
  RunConfig run = valid_run();
  run.optimizer_update = OptimizerUpdate::immediate;
  EXPECT_THAT(check_refusal(run),
              AllOf(HasSubstr("optimizer_update = immediate"), HasSubstr("max_grad_norm = 1")));
  run.max_grad_norm = 0;
  EXPECT_EQ(check_refusal(run), "");
}

TEST(CheckConfig, WantsSomethingToTrain) {
  RunConfig run = valid_run();
  run.num_train_epochs = 0;
  EXPECT_THAT(check_refusal(run), AllOf(HasSubstr("max_steps"), HasSubstr("num_train_epochs")));
  run.max_steps = 1;
  EXPECT_EQ(check_refusal(run), "");
}

TEST(CheckConfig, EmulationWithoutTheCoherentBackendIsRefused) {
  RunConfig run = valid_run();
  run.allow_emulation = true;
  EXPECT_EQ(check_refusal(run), "");
  run.backend = BackendChoice::explicit_copies;
  EXPECT_THAT(check_refusal(run), HasSubstr("allow_emulation"));
}

TEST(CheckConfig, AttentionKeysNeedTheirPattern) {
  RunConfig run = valid_run();
  run.attention_pattern.window = 64;
  run.attention_pattern.global_tokens = 4;
  EXPECT_THAT(
      check_refusal(run, {{"attention_window", "run.yaml:3"}}),
      AllOf(HasSubstr("2 problems"), HasSubstr("attention_window = 64 (run.yaml:3) means nothing with"),
            HasSubstr("attention_pattern = full (default); drop it, or set attention_pattern: window"),
            HasSubstr("attention_pattern: window or blocks")));
  run.attention_pattern.type = AttentionPatternType::window;
  EXPECT_EQ(check_refusal(run), "");
  run.attention_pattern.type = AttentionPatternType::blocks;
  EXPECT_THAT(check_refusal(run), AllOf(HasSubstr("attention_window = 64 (default) means nothing with"),
                                        HasSubstr("needs attention_block of 1 or more"),
                                        HasSubstr("needs attention_local_blocks of")));
  run.attention_pattern.window = 0;
  run.attention_pattern.block = 64;
  run.attention_pattern.local_blocks = 2;
  EXPECT_EQ(check_refusal(run), "");
  run.attention_pattern.global_tokens = -1;
  EXPECT_THAT(check_refusal(run), HasSubstr("attention_global_tokens = -1 (default) is refused"));
}

TEST(CheckConfig, AttentionPatternsThatLeaveNothingOutAreRefused) {
  RunConfig run = valid_run();
  run.cutoff_len = 1024;
  run.attention_pattern.type = AttentionPatternType::window;
  run.attention_pattern.window = 1000;
  run.attention_pattern.global_tokens = 23;
  EXPECT_EQ(check_refusal(run), "");
  run.attention_pattern.global_tokens = 24;
  EXPECT_THAT(check_refusal(run),
              AllOf(HasSubstr("attention_pattern = window (default) is full attention here"),
                    HasSubstr("attention_window = 1000"), HasSubstr("first 1024 tokens"),
                    HasSubstr("cutoff_len = 1024"), HasSubstr("set attention_pattern: full")));
  run.attention_pattern.type = AttentionPatternType::blocks;
  run.attention_pattern.window = 0;
  run.attention_pattern.block = 256;
  run.attention_pattern.local_blocks = 3;
  EXPECT_EQ(check_refusal(run), "");
  run.attention_pattern.global_tokens = 5000;
  EXPECT_THAT(check_refusal(run),
              AllOf(HasSubstr("attention_block = 256"), HasSubstr("attention_global_tokens = 5000")));
}

TEST(CheckConfig, LrSchedulerKwargsNeedAScheduleThatUsesThem) {
  RunConfig run = valid_run();
  run.lr_scheduler_kwargs.num_cycles = 2;
  run.lr_scheduler_kwargs.power = 2;
  EXPECT_THAT(
      check_refusal(run, {{"lr_scheduler_kwargs.power", "run.yaml:3"}}),
      AllOf(HasSubstr("2 problems"),
            HasSubstr("lr_scheduler_kwargs.num_cycles = 2 (default) means nothing with "
                      "lr_scheduler_type = linear (default); drop it, or set lr_scheduler_type: cosine "
                      "or cosine_with_restarts or cosine_with_min_lr or warmup_stable_decay"),
            HasSubstr("lr_scheduler_kwargs.power = 2 (run.yaml:3) means nothing with"),
            HasSubstr("lr_scheduler_type: polynomial")));
  run.lr_scheduler_kwargs.power.reset();
  run.lr_scheduler_type = SchedulerType::cosine;
  EXPECT_EQ(check_refusal(run), "");

  run.lr_scheduler_kwargs = {.power = 2, .lr_end = 1e-6};
  run.lr_scheduler_type = SchedulerType::polynomial;
  EXPECT_EQ(check_refusal(run), "");
  run.lr_scheduler_kwargs = {.timescale = 10};
  run.lr_scheduler_type = SchedulerType::inverse_sqrt;
  EXPECT_EQ(check_refusal(run), "");
  run.lr_scheduler_kwargs = {.num_cycles = 1.5,
                             .num_stable_steps = 3,
                             .num_decay_steps = 3,
                             .min_lr_ratio = 0.1,
                             .warmup_type = LrCurve::linear,
                             .decay_type = LrCurve::cosine};
  run.lr_scheduler_type = SchedulerType::warmup_stable_decay;
  EXPECT_EQ(check_refusal(run), "");
  run.lr_scheduler_type = SchedulerType::constant;
  EXPECT_THAT(check_refusal(run), HasSubstr("6 problems"));
}

TEST(CheckConfig, CosineWithRestartsFallsAWholeNumberOfTimes) {
  RunConfig run = valid_run();
  run.lr_scheduler_type = SchedulerType::cosine_with_restarts;
  run.lr_scheduler_kwargs.num_cycles = 3;
  EXPECT_EQ(check_refusal(run), "");
  run.lr_scheduler_kwargs.num_cycles = 1.5;
  EXPECT_THAT(check_refusal(run),
              AllOf(HasSubstr("lr_scheduler_kwargs.num_cycles = 1.5"), HasSubstr("a whole number")));
}

TEST(CheckConfig, CosineWithMinLrNeedsOneMinimumBelowThePeak) {
  RunConfig run = valid_run();
  run.lr_scheduler_type = SchedulerType::cosine_with_min_lr;
  EXPECT_THAT(check_refusal(run), HasSubstr("needs one of lr_scheduler_kwargs.min_lr = null"));
  run.lr_scheduler_kwargs.min_lr = 1e-6;
  EXPECT_EQ(check_refusal(run), "");
  run.lr_scheduler_kwargs.min_lr_rate = 0.1;
  EXPECT_THAT(check_refusal(run), HasSubstr("needs one of lr_scheduler_kwargs.min_lr = 1e-06"));
  run.lr_scheduler_kwargs.min_lr.reset();
  EXPECT_EQ(check_refusal(run), "");
  run.lr_scheduler_kwargs = {.min_lr = run.learning_rate};
  EXPECT_THAT(check_refusal(run), HasSubstr("must be below learning_rate = 5e-05"));
}

TEST(CheckConfig, PolynomialEndsBelowThePeak) {
  RunConfig run = valid_run();
  run.lr_scheduler_type = SchedulerType::polynomial;
  EXPECT_EQ(check_refusal(run), "");
  run.lr_scheduler_kwargs.lr_end = run.learning_rate;
  EXPECT_THAT(check_refusal(run), HasSubstr("must be below learning_rate = 5e-05"));
  run.lr_scheduler_kwargs.lr_end.reset();
  run.learning_rate = default_lr_end;
  EXPECT_THAT(check_refusal(run), HasSubstr("lr_scheduler_kwargs.lr_end = null (default) with"));
}

TEST(CheckConfig, WarmupStableDecayNeedsItsDecay) {
  RunConfig run = valid_run();
  run.lr_scheduler_type = SchedulerType::warmup_stable_decay;
  EXPECT_THAT(check_refusal(run), HasSubstr("needs lr_scheduler_kwargs.num_decay_steps"));
  run.lr_scheduler_kwargs.num_decay_steps = 10;
  EXPECT_EQ(check_refusal(run), "");
  run.lr_scheduler_kwargs.num_cycles = 1.5;
  run.lr_scheduler_kwargs.decay_type = LrCurve::linear;
  EXPECT_THAT(check_refusal(run), HasSubstr("lr_scheduler_kwargs.num_cycles = 1.5 (default) means nothing"));
}

TEST(CheckConfig, AutomaticResumeNeedsAnOutputDirectory) {
  RunConfig run = valid_run();
  run.resume_from_checkpoint = "auto";
  EXPECT_THAT(check_refusal(run), HasSubstr("output_dir"));
  run.output_dir = "runs/a";
  EXPECT_EQ(check_refusal(run), "");
}

TEST(CheckConfig, RangesHoldForConfigurationsThatWereNotParsed) {
  RunConfig run = valid_run();
  run.weight_slots = 0;
  run.cutoff_len = 1;
  run.compute_dtype = DType::f64;
  EXPECT_THAT(check_refusal(run), AllOf(HasSubstr("3 problems"), HasSubstr("weight_slots = 0"),
                                        HasSubstr("cutoff_len = 1"), HasSubstr("compute_dtype")));
}

TEST(CheckConfig, TokensOfAStepFitIn64Bits) {
  RunConfig run = valid_run();
  run.cutoff_len = run.per_device_train_batch_size = run.gradient_accumulation_steps = 2147483647;
  EXPECT_THAT(check_refusal(run), HasSubstr("overflow 64 bits"));
}

TEST(RequireKeys, NamesEveryMissingKeyAndWhoNeedsIt) {
  const LoadedConfig config = parse_config("config_name: m\n", "run.yaml");
  EXPECT_NO_THROW(require_keys(config, {"config_name"}, "plan"));
  try {
    require_keys(config, {"train_file", "output_dir", "config_name"}, "train");
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("`train_file` is needed to train"),
                      HasSubstr("`output_dir` is needed to train"), Not(HasSubstr("`config_name`"))));
  }
}

}  // namespace
}  // namespace layerstream
