#include "core/config.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "core/error.hpp"
#include "tests/support/scratch_directory.hpp"

namespace layerstream {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

LoadedConfig parse(std::string_view yaml, const std::vector<std::string>& overrides = {}) {
  return parse_config(yaml, "run.yaml", overrides);
}

std::string refusal(std::string_view yaml, const std::vector<std::string>& overrides = {}) {
  try {
    (void)parse(yaml, overrides);
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.code(), exit_code::refused);
    return error.what();
  }
  return "";
}

TEST(Config, EmptyFileGivesTheDefaults) {
  for (const std::string_view yaml : {"", "# only a comment\n", "---\n", "{}"}) {
    EXPECT_EQ(config_yaml(parse(yaml).run), config_yaml(RunConfig{}));
  }
}

TEST(Config, ReadsEveryKindOfValue) {
  const RunConfig run = parse(R"(
config_name: "models/a b"
train_file: [a.txt, "b c.txt"]
cutoff_len: 512
packing: no
overlong: drop
on_bad_line: skip
seed: 18446744073709551615
learning_rate: 1e-5
lr_scheduler_type: cosine
max_steps: 1e4
compute_dtype: fp32
rope: hf
backend: coherent
activation_policy: input+attention
activation_chunks: 4
device_activation_blocks: 12
optimizer_update: immediate
device_memory_limit: 24GiB
host_memory_limit: 40 GB
)")
                            .run;
  EXPECT_EQ(run.config_name, "models/a b");
  EXPECT_THAT(run.train_file, ElementsAre("a.txt", "b c.txt"));
  EXPECT_EQ(run.cutoff_len, 512);
  EXPECT_FALSE(run.packing);
  EXPECT_EQ(run.overlong, Overlong::drop);
  EXPECT_EQ(run.on_bad_line, OnBadLine::skip);
  EXPECT_EQ(run.seed, 18446744073709551615u);
  EXPECT_EQ(run.learning_rate, 1e-5);
  EXPECT_EQ(run.lr_scheduler_type, SchedulerType::cosine);
  EXPECT_EQ(run.max_steps, 10000);
  EXPECT_EQ(run.compute_dtype, DType::f32);
  EXPECT_EQ(run.rope, RopePrecision::hf);
  EXPECT_EQ(run.backend, BackendChoice::coherent);
  EXPECT_EQ(run.activation_policy, ActivationPolicy::input_attention);
  EXPECT_EQ(run.activation_chunks, 4);
  EXPECT_EQ(run.device_activation_blocks, 12);
  EXPECT_EQ(run.optimizer_update, OptimizerUpdate::immediate);
  EXPECT_EQ(run.device_memory_limit, 24ull << 30);
  EXPECT_EQ(run.host_memory_limit, 40'000'000'000u);
}

TEST(Config, TrainFileMayBeOnePath) {
  EXPECT_THAT(parse("train_file: a.txt").run.train_file, ElementsAre("a.txt"));
}

TEST(Config, NullMeansNotGivenForPathsAndLimits) {
  const RunConfig run = parse("resume_from_checkpoint: null\ntrain_file:\nhost_memory_limit: ~\n").run;
  EXPECT_EQ(run.resume_from_checkpoint, "");
  EXPECT_TRUE(run.train_file.empty());
  EXPECT_FALSE(run.host_memory_limit.has_value());
}

TEST(Config, UnknownKeyIsRefusedWithPlaceAndSuggestion) {
  const struct {
    const char* given;
    const char* meant;
  } cases[] = {{"lerning_rate", "learning_rate"},
               {"learning-rate", "learning_rate"},
               {"lr", "learning_rate"},
               {"warmup_step", "warmup_steps"},
               {"batch_size", "per_device_train_batch_size"},
               {"accumulation", "gradient_accumulation_steps"},
               {"max_seq_length", "cutoff_len"},
               {"activation_home", "device_activation_blocks"},
               {"bf16", "compute_dtype"},
               {"weihgt_decay", "weight_decay"},
               {"Seed", "seed"}};
  for (const auto& [given, meant] : cases) {
    EXPECT_THAT(refusal(std::string("seed: 1\n") + given + ": 1\n"),
                AllOf(HasSubstr("run.yaml:2"), HasSubstr(std::string("unknown key `") + given + "`"),
                      HasSubstr(std::string("did you mean `") + meant + "`")));
  }
}

TEST(Config, UnknownKeyNearNothingSuggestsNothing) {
  EXPECT_THAT(refusal("zzz: 1"), AllOf(HasSubstr("unknown key `zzz`"), Not(HasSubstr("did you mean"))));
}

TEST(Config, NestedKeyIsCalledMisplacedWithItsFullPath) {
  EXPECT_THAT(refusal("training:\n  optimizer:\n    learning_rate: 1e-4\n"),
              AllOf(HasSubstr("run.yaml:3"), HasSubstr("`training.optimizer.learning_rate` is misplaced"),
                    HasSubstr("keys are top level")));
  EXPECT_THAT(refusal("training:\n  lerning_rate: 1e-4\n"),
              AllOf(HasSubstr("run.yaml:2"), HasSubstr("unknown key `training.lerning_rate`"),
                    HasSubstr("`learning_rate`, at top level")));
  EXPECT_THAT(refusal("", {"training.learning_rate=1"}), HasSubstr("`training.learning_rate` is misplaced"));
}

TEST(Config, KeysOfAGroupMayBeNestedOrWrittenWithADot) {
  for (const char* const yaml :
       {"profile.start_step: 7\nprofile.num_steps: 2\n", "profile:\n  start_step: 7\n  num_steps: 2\n",
        "profile: {start_step: 7}\nprofile.num_steps: 2\n"}) {
    const LoadedConfig loaded = parse(yaml);
    EXPECT_EQ(loaded.run.profile_start_step, 7) << yaml;
    EXPECT_EQ(loaded.run.profile_num_steps, 2) << yaml;
  }
  EXPECT_EQ(parse("profile:\n  start_step: 7\n").origin_of("profile.start_step"), "run.yaml:2");
  EXPECT_EQ(parse("", {"profile.num_steps=3"}).run.profile_num_steps, 3);
  EXPECT_EQ(parse("", {"profile={num_steps: 3}"}).run.profile_num_steps, 3);
  EXPECT_THAT(refusal("profile.start_step: 7\nprofile:\n  start_step: 8\n"),
              AllOf(HasSubstr("run.yaml:3"), HasSubstr("`profile.start_step` is given twice")));
  EXPECT_THAT(refusal("profile:\n  start: 8\n"),
              AllOf(HasSubstr("run.yaml:2"), HasSubstr("unknown key `profile.start`")));
  EXPECT_THAT(refusal("profile:\n  learning_rate: 1e-4\n"), HasSubstr("is misplaced"));
}

TEST(Config, DuplicateKeyIsRefusedWithBothLines) {
  EXPECT_THAT(refusal("seed: 1\npacking: true\nseed: 1\n"),
              AllOf(HasSubstr("run.yaml:3"), HasSubstr("`seed` is given twice, first in line 1")));
}

TEST(Config, WrongTypeOrRangeNamesKeyValuePlaceAndWhatIsAllowed) {
  const struct {
    const char* line;
    const char* shown;
    const char* allowed;
  } cases[] = {
      {"cutoff_len: long", "cutoff_len = long", "integer >= 2 and < 2^31"},
      {"cutoff_len: 1", "cutoff_len = 1", "integer >= 2 and < 2^31"},
      {"cutoff_len: 2.5", "cutoff_len = 2.5", "integer >= 2 and < 2^31"},
      {"cutoff_len: 99999999999999999999", "cutoff_len = 99999999999999999999", "integer >= 2 and < 2^31"},
      {"cutoff_len:", "cutoff_len = (nothing)", "integer >= 2 and < 2^31"},
      {"cutoff_len: [4]", "cutoff_len = [4]", "integer >= 2 and < 2^31"},
      {"cutoff_len: {tokens: 4}", "cutoff_len = a map of tokens", "integer >= 2 and < 2^31"},
      {"weight_slots: 0", "weight_slots = 0", "integer 1 to 1024"},
      {"seed: -1", "seed = -1", "integer >= 0 and < 2^64"},
      {"learning_rate: -1e-5", "learning_rate = -1e-5", "number >= 0"},
      {"learning_rate: fast", "learning_rate = fast", "number >= 0"},
      {"learning_rate: .nan", "learning_rate = .nan", "number >= 0"},
      {"learning_rate: .inf", "learning_rate = .inf", "number >= 0"},
      {"learning_rate: 1e-5x", "learning_rate = 1e-5x", "number >= 0"},
      {"adam_beta1: 1.0", "adam_beta1 = 1.0", "number >= 0 and < 1"},
      {"adam_epsilon: 0", "adam_epsilon = 0", "number > 0"},
      {"lr_scheduler_type: greedy", "lr_scheduler_type = greedy", "one of constant, "},
      {"lr_scheduler_kwargs.num_cycles: 0", "num_cycles = 0", "number > 0"},
      {"lr_scheduler_kwargs.power: 0", "power = 0", "number > 0"},
      {"lr_scheduler_kwargs.lr_end: -1e-7", "lr_end = -1e-7", "number >= 0"},
      {"lr_scheduler_kwargs.min_lr: -1", "min_lr = -1", "number >= 0"},
      {"lr_scheduler_kwargs.min_lr_rate: 1.1", "min_lr_rate = 1.1", "number >= 0 and <= 1"},
      {"lr_scheduler_kwargs.timescale: 0", "timescale = 0", "integer >= 1"},
      {"lr_scheduler_kwargs.num_stable_steps: -1", "num_stable_steps = -1", "integer >= 0"},
      {"lr_scheduler_kwargs.num_decay_steps: 0.5", "num_decay_steps = 0.5", "integer >= 0"},
      {"lr_scheduler_kwargs.min_lr_ratio: -0.1", "min_lr_ratio = -0.1", "number >= 0 and <= 1"},
      {"lr_scheduler_kwargs.warmup_type: sqrt", "warmup_type = sqrt", "one of linear, cosine, 1-sqrt"},
      {"lr_scheduler_kwargs.decay_type: sqrt", "decay_type = sqrt", "one of linear, cosine, 1-sqrt"},
      {"warmup_ratio: 1.5", "warmup_ratio = 1.5", "number >= 0 and <= 1"},
      {"packing: 1", "packing = 1", "true or false"},
      {"packing: tRUE", "packing = tRUE", "true or false"},
      {"backend: pcie", "backend = pcie", "one of auto, explicit, coherent"},
      {"device_activation_blocks: host", "device_activation_blocks = host", "integer >= 0"},
      {"activation_chunks: 0", "activation_chunks = 0", "integer"},
      {"compute_dtype: fp16", "compute_dtype = fp16", "one of fp32, bf16"},
      {"rope: yarn", "rope = yarn", "one of exact, hf"},
      {"train_file: {a: b}", "train_file = a map of a", "a path, or a list of paths"},
      {"train_file: [[a]]", "train_file = [[a]]", "a path, or a list of paths"},
      {"train_file: ['']", "train_file = ['']", "a path, or a list of paths"},
      {"output_dir: [a]", "output_dir = [a]", "a directory"},
      {"device_memory_limit: 24G", "device_memory_limit = 24G", "24GiB"},
      {"device_memory_limit: 0", "device_memory_limit = 0", "bytes >= 1"},
      {"device_memory_limit: -1GiB", "device_memory_limit = -1GiB", "bytes >= 1"},
      {"device_memory_limit: 99999999999TiB", "device_memory_limit = 99999999999TiB", "bytes >= 1"},
  };
  for (const auto& [line, shown, allowed] : cases) {
    EXPECT_THAT(
        refusal(std::string("# first line\n") + line),
        AllOf(HasSubstr("run.yaml:2: "), HasSubstr(shown), HasSubstr("allowed: "), HasSubstr(allowed)))
        << line;
  }
}

TEST(Config, AllProblemsOfAFileAreToldAtOnce) {
  EXPECT_THAT(refusal("lerning_rate: 1\npacking: maybe\n", {"seed=x"}),
              AllOf(HasSubstr("run.yaml: 3 problems"), HasSubstr("run.yaml:1"), HasSubstr("run.yaml:2"),
                    HasSubstr("--set 'seed=x'")));
}

TEST(Config, ReadsYamlSpellingsOfBooleans) {
  for (const char* yes : {"true", "True", "TRUE", "yes", "Yes", "on", "ON", "y", "Y"}) {
    EXPECT_TRUE(parse(std::string("allow_emulation: ") + yes).run.allow_emulation) << yes;
  }
  for (const char* no : {"false", "False", "FALSE", "no", "NO", "off", "Off", "n"}) {
    EXPECT_FALSE(parse(std::string("packing: ") + no).run.packing) << no;
  }
}

TEST(Config, ReadsNumbersInEveryUsualForm) {
  const struct {
    const char* text;
    double value;
  } cases[] = {{"1e-5", 1e-5}, {"1E-5", 1e-5}, {"1.0e-05", 1e-5}, {".00001", 1e-5},
               {"+2", 2},      {"5.", 5},      {"0", 0},          {"\"3e-4\"", 3e-4}};
  for (const auto& [text, value] : cases) {
    EXPECT_EQ(parse(std::string("learning_rate: ") + text).run.learning_rate, value) << text;
  }
}

TEST(Config, ReadsByteSizes) {
  const struct {
    const char* text;
    std::uint64_t bytes;
  } cases[] = {{"1", 1},
               {"512 B", 512},
               {"24GiB", 24ull << 30},
               {"24 gib", 24ull << 30},
               {"40 GB", 40'000'000'000},
               {"1.5TiB", 3ull << 39},
               {"1kB", 1000},
               {"0.5 MiB", 524288},
               {"18446744073709551615", 18446744073709551615u}};
  for (const auto& [text, bytes] : cases) {
    EXPECT_EQ(parse(std::string("host_memory_limit: ") + text).run.host_memory_limit, bytes) << text;
  }
}

TEST(Config, OverrideBeatsTheFileAndTheLastOneWins) {
  const LoadedConfig config = parse("seed: 1\n", {"seed=2", "train_file=[a, b]", "seed=3", "config_name="});
  EXPECT_EQ(config.run.seed, 3u);
  EXPECT_THAT(config.run.train_file, ElementsAre("a", "b"));
  EXPECT_EQ(config.run.config_name, "");
  EXPECT_EQ(config.origin_of("seed"), "--set");
}

TEST(Config, OverrideKeepsEqualsSignsOfItsValue) {
  EXPECT_EQ(parse("", {"output_dir=runs/lr=1e-4"}).run.output_dir, "runs/lr=1e-4");
}

TEST(Config, BrokenOverridesAreRefused) {
  EXPECT_THAT(refusal("", {"seed"}), AllOf(HasSubstr("--set 'seed'"), HasSubstr("key=value")));
  EXPECT_THAT(refusal("", {"=1"}), HasSubstr("key=value"));
  EXPECT_THAT(refusal("", {"sed=1"}), AllOf(HasSubstr("--set 'sed=1'"), HasSubstr("did you mean `seed`")));
  EXPECT_THAT(refusal("", {"output_dir=[a"}), AllOf(HasSubstr("--set 'output_dir=[a'"), HasSubstr("quote")));
}

TEST(Config, MalformedYamlNamesTheLine) {
  EXPECT_THAT(refusal("seed: 1\ntrain_file: [a\n"),
              AllOf(HasSubstr("run.yaml:"), HasSubstr("not valid YAML")));
  EXPECT_THAT(refusal("seed: 1\n  packing: true\n"), HasSubstr("run.yaml:2"));
  EXPECT_THAT(refusal("- a\n- b\n"), HasSubstr("`key: value`"));
  EXPECT_THAT(refusal("just text"), HasSubstr("`key: value`"));
  EXPECT_THAT(refusal("seed: 1\n---\nseed: 2\n"), HasSubstr("second YAML document"));
  EXPECT_THAT(refusal("? [a, b]\n: 1\n"), HasSubstr("plain word"));
  EXPECT_THAT(refusal("seed: *nowhere\n"), HasSubstr("run.yaml:1"));
}

TEST(Config, AliasesThatNeverEndAreRefused) {
  EXPECT_THAT(refusal("train_file: &a [*a]\n"), HasSubstr("alias"));
  std::string bomb = "x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n";
  for (int i = 1; i < 9; ++i) {
    bomb += fmt::format("x{0}: &x{0} [*x{1}, *x{1}, *x{1}, *x{1}, *x{1}, *x{1}, *x{1}, *x{1}]\n", i, i - 1);
  }
  EXPECT_THAT(refusal(bomb), HasSubstr("alias"));
}

TEST(Config, PrintShowsWhereEachValueCameFrom) {
  const std::string text = describe_config(parse("# comment\nseed: 7\n", {"cutoff_len=64"}));
  EXPECT_THAT(text, ::testing::ContainsRegex("seed: 7 +# run.yaml:2\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("cutoff_len: 64 +# --set\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("packing: true +# default\n"));
}

TEST(Config, PrintedConfigurationReadsBackToTheSameValues) {
  RunConfig run;
  run.model_name_or_path = "null";
  run.config_name = "a: b # \"c\"\\\n\t\x01 é";
  run.train_file = {"-", "...", "~", "a,b", "[x", "true", "--- a", " lead"};
  run.output_dir = "---";
  run.seed = 18446744073709551615u;
  run.learning_rate = 0.1 + 0.2;
  run.adam_epsilon = 1e-300;
  run.activation_policy = ActivationPolicy::input_attention;
  run.device_activation_blocks = 7;
  run.device_memory_limit = 24ull << 30;
  run.host_memory_limit = 1000;
  const RunConfig again = parse(config_yaml(run)).run;
  EXPECT_EQ(config_yaml(again), config_yaml(run));
  EXPECT_EQ(again.model_name_or_path, run.model_name_or_path);
  EXPECT_EQ(again.config_name, run.config_name);
  EXPECT_EQ(again.train_file, run.train_file);
  EXPECT_EQ(again.output_dir, run.output_dir);
  EXPECT_EQ(again.learning_rate, run.learning_rate);
  EXPECT_EQ(again.host_memory_limit, run.host_memory_limit);
}

TEST(Config, LoadsAFileAndNamesOneThatIsMissing) {
  const test::ScratchDirectory dir;
  const auto path = dir.path() / "run.yaml";
  std::ofstream(path) << "seed: 9\r\n";
  EXPECT_EQ(load_config(path).run.seed, 9u);
  EXPECT_EQ(load_config(path).origin_of("seed"), path.string() + ":1");
  EXPECT_THROW((void)load_config(dir.path() / "none.yaml"), ConfigError);
  EXPECT_THROW((void)load_config(dir.path()), ConfigError);
}

TEST(Config, ReferenceInTheExamplesIsTheGeneratedOne) {
  const std::filesystem::path page =
      std::filesystem::path(LAYERSTREAM_SOURCE_DIR) / "examples" / "configuration.md";
  std::ifstream file(page);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (text == config_reference()) return;
  const std::filesystem::path generated = std::filesystem::path(::testing::TempDir()) / "configuration.md";
  std::ofstream(generated) << config_reference();
  FAIL() << "the schema has changed: cp " << generated.string() << " " << page.string();
}

TEST(Config, ReadsAttentionPatterns) {
  const RunConfig run = parse(
                            "attention_pattern: blocks\nattention_block: 128\nattention_local_blocks: 3\n"
                            "attention_global_tokens: 16\n")
                            .run;
  EXPECT_EQ(run.attention_pattern,
            (AttentionPattern{
                .type = AttentionPatternType::blocks, .block = 128, .local_blocks = 3, .global_tokens = 16}));
  EXPECT_THAT(refusal("sliding_window: 4096\n"), HasSubstr("attention_pattern"));
}

TEST(Config, ReadsTheSchedulesOfTransformersAndTheirKwargs) {
  for (const char* const name :
       {"constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt", "warmup_stable_decay"}) {
    const RunConfig run = parse(fmt::format("lr_scheduler_type: {}\n", name)).run;
    EXPECT_THAT(config_yaml(run), HasSubstr(fmt::format("lr_scheduler_type: {}\n", name)));
  }
  const RunConfig run = parse(R"(
lr_scheduler_type: warmup_stable_decay
lr_scheduler_kwargs:
  num_cycles: 1.5
  num_stable_steps: 300
  num_decay_steps: 1e2
  min_lr_ratio: 0.1
  warmup_type: cosine
  decay_type: 1-sqrt
)",
                              {"lr_scheduler_kwargs.power=2", "lr_scheduler_kwargs={lr_end: 1e-6}",
                               "lr_scheduler_kwargs.min_lr=1e-5", "lr_scheduler_kwargs.min_lr_rate=0.2",
                               "lr_scheduler_kwargs.timescale=50"})
                            .run;
  EXPECT_EQ(run.lr_scheduler_kwargs, (LrSchedulerKwargs{.num_cycles = 1.5,
                                                        .power = 2,
                                                        .lr_end = 1e-6,
                                                        .min_lr = 1e-5,
                                                        .min_lr_rate = 0.2,
                                                        .timescale = 50,
                                                        .num_stable_steps = 300,
                                                        .num_decay_steps = 100,
                                                        .min_lr_ratio = 0.1,
                                                        .warmup_type = LrCurve::cosine,
                                                        .decay_type = LrCurve::one_minus_sqrt}));
  EXPECT_EQ(parse(config_yaml(run)).run.lr_scheduler_kwargs, run.lr_scheduler_kwargs);
  EXPECT_THAT(refusal("min_lr: 1e-5\n"), HasSubstr("did you mean `lr_scheduler_kwargs.min_lr`"));
  EXPECT_THAT(refusal("lr_scheduler_kwargs: {num_cycle: 2}\n"),
              AllOf(HasSubstr("did you mean `lr_scheduler_kwargs.num_cycles`"), Not(HasSubstr("top level"))));
}

}  // namespace
}  // namespace layerstream
