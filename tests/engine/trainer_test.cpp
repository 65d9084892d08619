// Runs: checkpoints that are kept, skipped steps, runs that end early.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "engine/checkpoint_io.hpp"
#include "run_fixture.hpp"
#include "tests/io/faulty_file_system.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using ::testing::Not;

class Checkpoints : public ::testing::Test {
 protected:
  RunFiles files_;
};

TEST_F(Checkpoints, SaveStepsAndSaveTotalLimitSayWhichAreThere) {
  RunConfig config = files_.config();
  config.save_steps = 5;
  train_to_the_end(config);
  EXPECT_THAT(names_in(config.output_dir), ElementsAre("checkpoint-10", "checkpoint-12", "checkpoint-5",
                                                       "metrics.jsonl", "run.json", "timeline.json"));
  config = files_.config("limited");
  config.save_steps = 3;
  config.save_total_limit = 2;
  train_to_the_end(config);
  EXPECT_THAT(names_in(config.output_dir),
              ElementsAre("checkpoint-12", "checkpoint-9", "metrics.jsonl", "run.json", "timeline.json"));
}

TEST_F(Checkpoints, AResumeNamesChangesAfterWhichTheRestIsAnotherRun) {
  // Documents shorter than any row here: the same rows whatever cutoff_len is.
  for (std::uint64_t i = 0; i < 8; ++i) {
    write_text(files_.path(fmt::format("short/{}.txt", i)), text_of_words(20, i));
  }
  const auto config_of = [&](const std::string& output) {
    RunConfig config = files_.config(output);
    config.train_file = {files_.path("short").string()};
    config.packing = false;
    return config;
  };
  const auto log_of_resume = [&](const std::string& output, const std::function<void(RunConfig&)>& change) {
    RunConfig config = config_of(output);
    if (!fs::exists(config.output_dir)) {
      TestRun run(config);
      run->step();
      run->save();
    }
    config.resume_from_checkpoint = "auto";
    change(config);
    return TestRun(config).log();
  };
  const auto longer_rows = [](RunConfig& run) { run.cutoff_len = 40; };
  EXPECT_THAT(log_of_resume("plain", [](RunConfig&) {}), Not(HasSubstr("changed since")));
  EXPECT_THAT(log_of_resume("plain", [](RunConfig& run) { run.rope = RopePrecision::hf; }),
              AllOf(HasSubstr("changed since"), HasSubstr("checkpoint-1: rope; the rest of the run")));
  EXPECT_THAT(log_of_resume("plain", [](RunConfig& run) { run.lr_scheduler_kwargs.num_cycles = 1.5; }),
              HasSubstr("checkpoint-1: lr_scheduler_kwargs; the rest of the run"));
  const auto window = [](RunConfig& run) {
    run.attention_pattern.type = AttentionPatternType::window;
    run.attention_pattern.window = 8;
  };
  EXPECT_THAT(log_of_resume("plain", window),
              AllOf(HasSubstr("changed since"), HasSubstr("attention_pattern and its keys"),
                    HasSubstr("computes another function")));
  EXPECT_THAT(log_of_resume("plain", longer_rows), Not(HasSubstr("changed since")));
  EXPECT_THAT(log_of_resume("plain", [](RunConfig& run) { run.chunk_tokens = 32; }),
              HasSubstr("checkpoint-1: chunk_tokens; the rest of the run"));
  // Not given, they are what they were, however many would fit here.
  EXPECT_THAT(log_of_resume("plain", [](RunConfig& run) { run.chunk_tokens.reset(); }),
              AllOf(HasSubstr("chunks of up to 64"), Not(HasSubstr("changed since"))));

  auto model = small_model_json();
  model["max_position_embeddings"] = 16;
  model["rope_scaling"] = {{"rope_type", "dynamic"}, {"factor", 2.0}};
  write_text(files_.path("model/config.json"), model.dump());
  EXPECT_THAT(log_of_resume("dynamic", [](RunConfig&) {}), Not(HasSubstr("changed since")));
  EXPECT_THAT(log_of_resume("dynamic", longer_rows),
              AllOf(HasSubstr("changed since"), HasSubstr("cutoff_len (rope_parameters depend on it)")));
}

TEST_F(Checkpoints, AFullDiskAtAnyMomentOfASaveLeavesTheEarlierOneResumable) {
  using io::testing::FaultyFileSystem;
  const Outcome expected = train_to_the_end(files_.config("straight"));
  RunConfig config = files_.config();
  {
    TestRun run(config);
    for (int i = 0; i < 4; ++i) run->step();
    run->save();
    run->step();
    run->engine().apply_pending();
    const CheckpointExtras extras{.config_json = small_model_json().dump(), .run_yaml = "", .companions = {}};
    auto counting = std::make_shared<FaultyFileSystem>();
    save_checkpoint(files_.path("elsewhere"), run->engine().parameters(), run->state(), extras, counting);
    ASSERT_GT(counting->calls(), 20);
    int failed = 0;
    for (int call = 1; call <= counting->calls(); ++call) {
      auto full = std::make_shared<FaultyFileSystem>(FaultyFileSystem::Fault::disk_full_from, call);
      try {
        save_checkpoint(config.output_dir, run->engine().parameters(), run->state(), extras, full);
        // Only where no later call takes space: the new one is whole then.
        ASSERT_EQ(io::newest_complete(config.output_dir)->step, 5);
        fs::remove_all(fs::path(config.output_dir) / "checkpoint-5");
      } catch (const FileError& error) {
        EXPECT_THAT(error.what(), HasSubstr("No space left"));
        ++failed;
      }
      ASSERT_EQ(io::newest_complete(config.output_dir)->step, 4) << "call " << call;
    }
    EXPECT_GT(failed, counting->calls() / 2);
  }
  config.resume_from_checkpoint = "auto";
  EXPECT_TRUE(train_to_the_end(config) == expected);
}

TEST_F(Checkpoints, AStopBetweenTheBlocksOfASaveLeavesTheEarlierOneResumable) {
  const Outcome expected = train_to_the_end(files_.config("straight"));
  RunConfig config = files_.config();
  {
    TestRun run(config);
    for (int i = 0; i < 4; ++i) run->step();
    run->save();
    run->step();
    run->engine().apply_pending();
    for (int stop_at = 0; stop_at < run->engine().parameters().layout().num_blocks(); ++stop_at) {
      EXPECT_THROW(save_checkpoint(config.output_dir, run->engine().parameters(), run->state(), {},
                                   std::make_shared<io::FileSystem>(),
                                   [&](int done, int) {
                                     if (done == stop_at) throw Interrupted("stop");
                                   }),
                   Interrupted);
      EXPECT_THAT(names_in(config.output_dir),
                  ElementsAre("checkpoint-4", "metrics.jsonl", "run.json", "timeline.json"));
    }
  }
  config.resume_from_checkpoint = "auto";
  EXPECT_TRUE(train_to_the_end(config) == expected);
}

TEST_F(Checkpoints, ACheckpointTakesTheBytesThatWereAskedOfTheDisk) {
  TestRun run(files_.config());
  run->step();
  std::uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(run->save())) bytes += entry.file_size();
  const std::uint64_t asked = checkpoint_bytes(run->engine().parameters().layout());
  EXPECT_LE(bytes, asked);
  EXPECT_GE(bytes, static_cast<std::uint64_t>(run->engine().parameters().layout().num_parameters()) * 12);
}

class Run : public ::testing::Test {
 protected:
  RunFiles files_;
};

TEST_F(Run, SevenRowsAtAccumulationFourAreTwoCorrectSteps) {
  RunConfig config = files_.config();
  config.train_file.clear();
  for (int i = 0; i < 7; ++i) {
    const std::string name = files_.path(fmt::format("documents/{}.txt", i)).string();
    write_text(name, text_of_words(static_cast<std::size_t>(5 + 4 * i), static_cast<std::uint64_t>(i)));
    config.train_file.push_back(name);
  }
  config.packing = false;
  config.per_device_train_batch_size = 1;
  config.gradient_accumulation_steps = 4;
  config.max_steps = -1;
  config.num_train_epochs = 1;
  config.learning_rate = 1e-2;
  config.lr_scheduler_type = SchedulerType::constant;
  config.warmup_steps = 0;
  TestRun run(config);
  ASSERT_EQ(run->dataset().num_rows(), 7);
  ASSERT_EQ(run->total_steps(), 2);

  // The same by hand, with all rows of a step in one batch.
  RunConfig by_hand = config;
  by_hand.per_device_train_batch_size = 4;
  by_hand.gradient_accumulation_steps = 1;
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  const ModelSpec spec = load_hf_config(config.config_name);
  Engine engine(spec, by_hand, EngineMode::train, *device);
  engine.parameters().initialize(config.seed, spec.initializer_range, engine.pool());
  io::DataOrder order(7, 4, config.seed);
  std::multiset<std::int64_t> visited;
  for (int step = 0; step < 2; ++step) {
    std::vector<TokenRow> rows;
    std::int64_t targets = 0;
    for (const std::int64_t index : order.step(step).rows) {
      visited.insert(index);
      rows.push_back(run->dataset().row(index));
      targets += rows.back().num_targets();
    }
    EXPECT_EQ(rows.size(), step == 0 ? 4U : 3U);
    const double loss = engine.evaluate(rows) / static_cast<double>(targets);
    engine.train_step(rows, {.adamw = {.learning_rate = 1e-2, .weight_decay = 0.1, .step = step + 1},
                             .max_grad_norm = 1.0});
    const StepResult result = run->step();
    EXPECT_EQ(result.num_targets, targets);
    EXPECT_EQ(result.loss, loss);
  }
  EXPECT_EQ(visited, (std::multiset<std::int64_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_TRUE(run->done());
  engine.apply_pending();
  EXPECT_TRUE(run.slabs() == slab_bytes(engine.parameters()));
}

/// Sets an element of the embedding that every row reads.
void poison_embedding(Trainer& trainer, float value) {
  ParameterStore& store = trainer.engine().parameters();
  const Parameter& table = store.layout().blocks[0].at("embed_tokens.weight");
  store.write(0, table, ' ' * 32, std::vector<float>{value});
  store.bump_version(0);
}

TEST_F(Run, StepsWithoutAFiniteGradientChangeNothingAndEndTheRunWithTheCheckpointKept) {
  RunConfig config = files_.config();
  config.max_skipped_steps = 3;
  config.max_steps = 9;
  config.save_steps = 4;
  {
    TestRun run(config);
    for (int i = 0; i < 4; ++i) run->step();
    run->save();
    poison_embedding(*run, std::numeric_limits<float>::quiet_NaN());
    const auto before = run.slabs();
    try {
      run->run();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), exit_code::not_finite);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("3 steps in a row"), HasSubstr(config.output_dir)));
    }
    EXPECT_TRUE(run.slabs() == before);
    EXPECT_EQ(run->state().global_step, 7);
    EXPECT_EQ(run->state().applied_steps, 4);
    EXPECT_THAT(run.log(), HasSubstr("nothing was changed (3 such steps in a row, 3 end the run)"));
  }
  EXPECT_THAT(names_in(config.output_dir),
              ElementsAre("checkpoint-4", "metrics.jsonl", "run.json", "timeline.json"));
  config.resume_from_checkpoint = "auto";
  TestRun again(config);
  again->run();
  EXPECT_EQ(again->state().applied_steps, 9);
}

TEST_F(Run, ASkippedStepBetweenGoodOnesCountsAsTakenButNotAsApplied) {
  RunConfig config = files_.config();
  config.max_skipped_steps = 2;
  TestRun run(config);
  run->step();
  run->engine().apply_pending();
  const float good =
      merge(run->engine().parameters().slab(0).hi[' ' * 32], run->engine().parameters().slab(0).lo[' ' * 32]);
  poison_embedding(*run, std::numeric_limits<float>::infinity());
  EXPECT_FALSE(run->step().applied);
  EXPECT_EQ(run->state().skipped_in_row, 1);
  poison_embedding(*run, good);
  EXPECT_TRUE(run->step().applied);
  EXPECT_EQ(run->state().skipped_in_row, 0);
  EXPECT_EQ(run->state().global_step, 3);
  EXPECT_EQ(run->state().applied_steps, 2);
  EXPECT_THAT(metrics_lines(config.output_dir)[1],
              AllOf(HasSubstr(R"("loss":null)"), HasSubstr(R"("applied":false)")));
}

TEST_F(Run, TheLogSaysWhatTheDataAreLineByLine) {
  TestRun run(files_.config());
  EXPECT_THAT(run.log(),
              AllOf(HasSubstr("data: read: 1 text files"), HasSubstr("data: rows: 20 of up to 32 tokens"),
                    HasSubstr("memory:   host    total")));
}

TEST_F(Run, PlainTextForAModelWithATokenizerOfItsOwnIsWarnedAbout) {
  {
    TestRun source(files_.config("source"));
    export_model(
        source->engine().parameters(),
        {.directory = files_.path("weights"), .config_json = small_model_json().dump(), .dtype = DType::f32});
  }
  RunConfig config = files_.config();
  config.config_name.clear();
  config.model_name_or_path = files_.path("weights").string();
  {
    TestRun run(config);
    EXPECT_THAT(run.log(), Not(HasSubstr("tokenizer")));
  }
  write_text(files_.path("weights/tokenizer.json"), "{}");
  TestRun run(config);
  EXPECT_THAT(run.log(), AllOf(HasSubstr("warning"),
                               HasSubstr("byte tokens, which mean nothing to " + config.model_name_or_path)));
}

TEST_F(Run, AStopWhileReadingDataOrLoadingWeightsIsHonoured) {
  const RunConfig config = files_.config();
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  std::ostringstream lines;
  StopRequest stop;
  stop.request(SIGUSR1);
  EXPECT_THAT(message_of<Interrupted>(
                  [&] { Trainer trainer({.run = config, .origins = {}}, *device, stop, Log(lines)); }),
              HasSubstr("stopped by SIGUSR1 while reading the training data"));
  EXPECT_FALSE(fs::exists(config.output_dir));
}

TEST(LongRows, AreWarnedOfWhereTheRotaryEmbeddingEnds) {
  ModelSpec spec = tiny_spec();
  spec.max_position_embeddings = 100;
  EXPECT_EQ(long_row_warning(spec, 100), "");
  EXPECT_THAT(long_row_warning(spec, 101), HasSubstr("made for 100 positions"));
  spec.rope = {.type = RopeType::yarn, .factor = 4.0, .original_max_position_embeddings = 100};
  EXPECT_EQ(long_row_warning(spec, 400), "");
}

class CheckpointToResume : public ::testing::Test {
 protected:
  CheckpointToResume() : config_(files_.config()) {
    TestRun run(config_);
    run->step();
    run->save();
    run->step();
    run->save();
  }
  RunFiles files_;
  RunConfig config_;
};

TEST_F(CheckpointToResume, AStopIsObeyedWhileItIsVerified) {
  config_.resume_from_checkpoint = "auto";
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  std::ostringstream lines;
  StopRequest stop;
  stop.request(SIGTERM);
  EXPECT_THAT(message_of<Interrupted>(
                  [&] { Trainer trainer({.run = config_, .origins = {}}, *device, stop, Log(lines)); }),
              AllOf(HasSubstr("stopped by SIGTERM while verifying"), HasSubstr("checkpoint-2")));
}

TEST_F(CheckpointToResume, ALaterOneIsNamedBeforeAllOfItIsRead) {
  const fs::path older = fs::path(config_.output_dir) / "checkpoint-1";
  config_.resume_from_checkpoint = older.string();
  const fs::path weights = older / "block-00001.safetensors";
  std::string bytes = read_text(weights);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_text(weights, bytes);
  EXPECT_THAT(
      message_of<ConfigError>([&] { TestRun{config_}; }),
      AllOf(HasSubstr("is at step 1"), HasSubstr("holds checkpoint-2"), HasSubstr("later checkpoints away")));
  fs::remove_all(older.parent_path() / "checkpoint-2");
  EXPECT_THAT(message_of<FileError>([&] { TestRun{config_}; }),
              AllOf(HasSubstr("block-00001.safetensors"), HasSubstr("its content changed")));
}

}  // namespace
}  // namespace layerstream::test
