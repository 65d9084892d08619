// Runs: resume, refusals before step 0, checkpoints that are kept, runs that end early.

#include "engine/trainer.hpp"

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
using ::testing::IsEmpty;
using ::testing::Not;

/// What a run leaves: to be equal bit by bit.
struct Outcome {
  std::vector<std::vector<std::uint8_t>> slabs;
  std::vector<std::string> metrics;
  std::int64_t applied_steps = 0;
  std::int64_t tokens_seen = 0;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome outcome(TestRun& run, const RunConfig& config) {
  return {run.slabs(), metrics_lines(config.output_dir), run->state().applied_steps,
          run->state().tokens_seen};
}

Outcome train_to_the_end(const RunConfig& config) {
  TestRun run(config);
  const TrainingEnd end = run->run();
  EXPECT_FALSE(end.interrupted);
  EXPECT_EQ(end.global_step, config.max_steps);
  return outcome(run, config);
}

// --- 26: resume ---

struct Placement {
  std::string name;
  std::function<void(RunConfig&)> turn;
};

void PrintTo(const Placement& placement, std::ostream* stream) {
  *stream << placement.name;
}

class Resume : public ::testing::TestWithParam<Placement> {
 protected:
  RunFiles files_;
};

TEST_P(Resume, ContinuesBitForBitFromEveryStepWithOtherPlacement) {
  RunConfig straight = files_.config("straight");
  const Outcome expected = train_to_the_end(straight);
  ASSERT_EQ(expected.metrics.size(), 12U);
  // The first step, within the first epoch, at its end, within the second and the third.
  for (const int steps : {1, 3, 5, 8, 11}) {
    RunConfig config = files_.config(fmt::format("resumed_at_{}", steps));
    {
      TestRun first(config);
      for (int i = 0; i < steps; ++i) first->step();  // leaves a deferred update pending
      first->save();
    }
    config.resume_from_checkpoint = "auto";
    GetParam().turn(config);
    TestRun second(config);
    EXPECT_EQ(second->state().global_step, steps);
    second->run();
    EXPECT_TRUE(outcome(second, config) == expected) << "resumed at " << steps;
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, Resume,
                         ::testing::Values(Placement{"same", [](RunConfig&) {}},
                                           Placement{"other_slots_threads_and_accumulation",
                                                     [](RunConfig& run) {
                                                       run.weight_slots = 4;
                                                       run.optimizer_threads = 2;
                                                       run.per_device_train_batch_size = 4;
                                                       run.gradient_accumulation_steps = 1;
                                                     }},
                                           Placement{"coherent_backend",
                                                     [](RunConfig& run) {
                                                       run.backend = BackendChoice::coherent;
                                                       run.allow_emulation = true;
                                                     }},
                                           Placement{"activations_saved_on_device",
                                                     [](RunConfig& run) {
                                                       run.activation_policy = ActivationPolicy::all;
                                                       run.activations_on_host = false;
                                                     }}),
                         [](const auto& info) { return info.param.name; });

TEST_F(Resume, SavingEveryStepChangesNothing) {
  const Outcome expected = train_to_the_end(files_.config("straight"));
  RunConfig config = files_.config("saving");
  config.save_steps = 1;
  EXPECT_TRUE(train_to_the_end(config) == expected);
}

TEST_F(Resume, ABf16RunWithImmediateUpdatesContinuesBitForBit) {
  const auto turn = [](RunConfig run) {
    run.compute_dtype = DType::bf16;
    run.optimizer_update = OptimizerUpdate::immediate;
    run.max_grad_norm = 0.0;
    return run;
  };
  const Outcome expected = train_to_the_end(turn(files_.config("straight")));
  RunConfig config = turn(files_.config("resumed"));
  {
    TestRun first(config);
    for (int i = 0; i < 7; ++i) first->step();
    first->save();
  }
  config.resume_from_checkpoint = "auto";
  EXPECT_TRUE(train_to_the_end(config) == expected);
}

/// Asks for a stop in the middle of a step.
class StopDuringStep final : public ExecutionObserver {
 public:
  StopDuringStep(StopRequest*& stop, int operations) : stop_(stop), left_(operations) {}
  void before(int, const Operation&) override {
    if (--left_ == 0) stop_->request(SIGTERM);
  }
  void after(int, const Operation&) override {}

 private:
  StopRequest*& stop_;
  std::atomic<int> left_;
};

TEST_F(Resume, AStopInTheMiddleOfAStepLeavesACheckpointThatContinuesBitForBit) {
  const Outcome expected = train_to_the_end(files_.config("straight"));
  for (const int operations : {1, 200, 777}) {
    RunConfig config = files_.config(fmt::format("stopped_{}", operations));
    std::int64_t stopped_at = 0;
    {
      StopRequest* stop = nullptr;
      StopDuringStep observer(stop, operations);
      TestRun first(config, {.observer = &observer});
      stop = &first.stop();
      const TrainingEnd end = first->run();
      EXPECT_TRUE(end.interrupted);
      EXPECT_EQ(end.checkpoint, fs::path(config.output_dir) / fmt::format("checkpoint-{}", end.global_step));
      stopped_at = end.global_step;
      EXPECT_THAT(first.log(), HasSubstr("SIGTERM received"));
    }
    ASSERT_GT(stopped_at, 0);
    ASSERT_LT(stopped_at, 12);
    config.resume_from_checkpoint = "auto";
    EXPECT_TRUE(train_to_the_end(config) == expected) << "stopped at " << stopped_at;
  }
}

TEST_F(Resume, AStopBeforeTheFirstStepLeavesNoCheckpoint) {
  const RunConfig config = files_.config();
  TestRun run(config);
  run.stop().request(SIGUSR1);
  const TrainingEnd end = run->run();
  EXPECT_TRUE(end.interrupted);
  EXPECT_TRUE(end.checkpoint.empty());
  EXPECT_FALSE(io::newest_complete(config.output_dir));
}

TEST_F(Resume, AutoWithoutCheckpointsStartsFresh) {
  RunConfig config = files_.config();
  config.resume_from_checkpoint = "auto";
  TestRun run(config);
  EXPECT_EQ(run->state().global_step, 0);
  EXPECT_THAT(run.log(), HasSubstr("fresh weights"));
}

TEST_F(Resume, AFinishedRunHasNothingToDo) {
  RunConfig config = files_.config();
  train_to_the_end(config);
  config.resume_from_checkpoint = "auto";
  TestRun run(config);
  EXPECT_TRUE(run->done());
  const TrainingEnd end = run->run();
  EXPECT_FALSE(end.interrupted);
  EXPECT_THAT(names_in(config.output_dir), ElementsAre("checkpoint-12", "metrics.jsonl"));
}

class Refusal : public ::testing::Test {
 protected:
  /// The refusal of a run that goes on from a checkpoint of three steps, after `change`.
  std::string after(const std::function<void(RunConfig&)>& change) {
    RunConfig config = files_.config();
    if (!fs::exists(config.output_dir)) {
      TestRun run(config);
      for (int i = 0; i < 3; ++i) run->step();
      run->save();
    }
    config.resume_from_checkpoint = "auto";
    change(config);
    return refusal<Error>([&] { TestRun run(config); });
  }
  RunFiles files_;
};

TEST_F(Refusal, AResumeWithAnotherSeedBatchDataOrModelNamesTheDifference) {
  EXPECT_THAT(after([](RunConfig& run) { run.seed = 43; }),
              AllOf(HasSubstr("seed was 42 and is 43 now"), HasSubstr("checkpoint-3")));
  EXPECT_THAT(after([](RunConfig& run) { run.gradient_accumulation_steps = 3; }),
              HasSubstr("per_device_train_batch_size x gradient_accumulation_steps was 4 and is 6 now"));
  EXPECT_THAT(after([](RunConfig& run) { run.cutoff_len = 31; }), HasSubstr("content of the training data"));
  write_text(files_.path("data.txt"), text_of_words(639, 2));
  EXPECT_THAT(after([](RunConfig&) {}), HasSubstr("content of the training data"));
  write_text(files_.path("data.txt"), text_of_words(639, 1));
  auto model = small_model_json();
  model["rope_theta"] = 20000.0;
  model["use_cache"] = false;  // no matter by itself
  write_text(files_.path("model/config.json"), model.dump());
  EXPECT_THAT(after([](RunConfig&) {}), AllOf(HasSubstr("checkpoint-3"), HasSubstr("rope_theta")));
  model["rope_theta"] = 10000.0;
  write_text(files_.path("model/config.json"), model.dump());
  RunConfig config = files_.config();
  config.resume_from_checkpoint = "auto";
  EXPECT_NO_THROW(TestRun run(config));
}

/// Copies a checkpoint, passing each tensor through `change`, which may drop it or alter its dtype.
void copy_checkpoint(const fs::path& from, const fs::path& output_dir,
                     const std::function<bool(std::string& name, DType& dtype)>& change) {
  const io::CheckpointReader reader(from);
  io::CheckpointWriter writer(output_dir, reader.step());
  for (const io::CheckpointFile& entry : reader.files()) {
    if (!entry.name.ends_with(".safetensors")) {
      writer.text(entry.name, reader.text(entry.name));
      continue;
    }
    const io::SafetensorsFile file = reader.safetensors(entry.name);
    std::vector<io::TensorSpec> specs;
    std::vector<const io::TensorEntry*> sources;
    for (const io::TensorEntry& tensor : file.entries()) {
      std::string name = tensor.name;
      DType dtype = tensor.dtype;
      if (!change(name, dtype)) continue;
      specs.push_back({name, dtype, tensor.shape});
      sources.push_back(&tensor);
    }
    io::SafetensorsWriter& copy = writer.safetensors(entry.name, specs);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(sources[i]->numel()) * size_of(specs[i].dtype));
      file.read(*sources[i], 0, bytes);
      copy.append(specs[i].name, bytes);
    }
    copy.finish();
  }
  writer.commit();
}

TEST_F(Refusal, ALossyResumeIsRefusedWithFileAndTensor) {
  const RunConfig config = files_.config();
  {
    TestRun run(config);
    run->step();
    run->save();
  }
  const fs::path good = fs::path(config.output_dir) / "checkpoint-1";
  const auto resumed = [&](const fs::path& output) {
    RunConfig other = config;
    other.output_dir = output.string();
    other.resume_from_checkpoint = "auto";
    return other;
  };
  copy_checkpoint(good, files_.path("unchanged"), [](std::string&, DType&) { return true; });
  EXPECT_NO_THROW(TestRun run(resumed(files_.path("unchanged"))));

  for (const std::string part : {"/exp_avg", "/exp_avg_sq", "/hi", "/lo"}) {
    const std::string victim = "model.layers.1.mlp.up_proj.weight" + part;
    const fs::path dropped = files_.path("dropped" + part);
    copy_checkpoint(good, dropped, [&](std::string& name, DType&) { return name != victim; });
    EXPECT_THAT(
        refusal<FileError>([&] { TestRun run(resumed(dropped)); }),
        AllOf(HasSubstr(victim), HasSubstr("block-00002.safetensors"), HasSubstr("cannot be resumed")));
  }
  for (const std::string part : {"/exp_avg", "/exp_avg_sq"}) {
    const std::string victim = "model.layers.1.mlp.up_proj.weight" + part;
    const fs::path rounded = files_.path("rounded" + part);
    copy_checkpoint(good, rounded, [&](std::string& name, DType& dtype) {
      if (name == victim) dtype = DType::bf16;
      return true;
    });
    EXPECT_THAT(refusal<FileError>([&] { TestRun run(resumed(rounded)); }),
                AllOf(HasSubstr(victim), HasSubstr("bf16"), HasSubstr("refusing a lossy resume")));
  }
}

TEST_F(Refusal, AnOutputDirectoryWithCheckpointsIsNotOverwritten) {
  EXPECT_THAT(after([](RunConfig& run) { run.resume_from_checkpoint.clear(); }),
              AllOf(HasSubstr("checkpoint-3"), HasSubstr("resume_from_checkpoint: auto")));
}

TEST_F(Refusal, ANamedCheckpointThatIsNotThereIsNamed) {
  EXPECT_THAT(
      after([&](RunConfig& run) { run.resume_from_checkpoint = files_.path("out/checkpoint-99").string(); }),
      HasSubstr("checkpoint-99"));
}

TEST_F(Refusal, TooLittleDiskForTheCheckpointsToComeIsFoundBeforeAnythingIsMade) {
  RunConfig config = files_.config();
  config.max_steps = 2'000'000'000;
  config.save_steps = 1;
  EXPECT_THAT(refusal<ResourceError>([&] { TestRun run(config); }),
              AllOf(HasSubstr("checkpoints need"), HasSubstr("free")));
  EXPECT_FALSE(fs::exists(config.output_dir));
  config.save_total_limit = 2;
  EXPECT_NO_THROW(TestRun run(config));
}

TEST_F(Refusal, TooLittleMemoryIsFoundBeforeAnythingIsMade) {
  for (const auto limit : {&RunConfig::host_memory_limit, &RunConfig::device_memory_limit}) {
    RunConfig config = files_.config();
    config.*limit = 100'000;
    config.train_file = {files_.path("absent.txt").string()};  // not even looked for
    SimulatedDevice device(config.device_memory_limit.value_or(std::size_t{1} << 30));
    StopRequest stop;
    std::ostringstream lines;
    EXPECT_THAT(refusal<ResourceError>(
                    [&] { Trainer trainer({.run = config, .origins = {}}, device, stop, Log(lines)); }),
                AllOf(HasSubstr("need "), HasSubstr("have 97.66 KiB"), HasSubstr("Adam moments")));
    EXPECT_FALSE(fs::exists(config.output_dir));
  }
}

TEST_F(Refusal, WeightsThatDoNotFitTheConfigurationAreFoundBeforeAnythingIsMade) {
  const RunConfig fresh = files_.config("source");
  TestRun source(fresh);
  export_model(
      source->engine().parameters(),
      {.directory = files_.path("weights"), .config_json = small_model_json().dump(), .dtype = DType::f32});
  auto model = small_model_json();
  model["intermediate_size"] = 64;
  write_text(files_.path("weights/config.json"), model.dump());
  RunConfig config = files_.config();
  config.config_name.clear();
  config.model_name_or_path = files_.path("weights").string();
  EXPECT_THAT(refusal<FileError>([&] { TestRun run(config); }), HasSubstr("of another shape or type (9)"));
  EXPECT_FALSE(fs::exists(config.output_dir));
}

// --- 25: checkpoints ---

class Checkpoints : public ::testing::Test {
 protected:
  RunFiles files_;
};

TEST_F(Checkpoints, SaveStepsAndSaveTotalLimitSayWhichAreThere) {
  RunConfig config = files_.config();
  config.save_steps = 5;
  train_to_the_end(config);
  EXPECT_THAT(names_in(config.output_dir),
              ElementsAre("checkpoint-10", "checkpoint-12", "checkpoint-5", "metrics.jsonl"));
  config = files_.config("limited");
  config.save_steps = 3;
  config.save_total_limit = 2;
  train_to_the_end(config);
  EXPECT_THAT(names_in(config.output_dir), ElementsAre("checkpoint-12", "checkpoint-9", "metrics.jsonl"));
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
      EXPECT_THAT(names_in(config.output_dir), ElementsAre("checkpoint-4", "metrics.jsonl"));
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

// --- 11, 21 at the level of a run ---

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
  SimulatedDevice device(std::size_t{1} << 30);
  const ModelSpec spec = load_hf_config(config.config_name);
  Engine engine(spec, by_hand, EngineMode::train, device);
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
  EXPECT_THAT(names_in(config.output_dir), ElementsAre("checkpoint-4", "metrics.jsonl"));
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
  SimulatedDevice device(std::size_t{1} << 30);
  std::ostringstream lines;
  StopRequest stop;
  stop.request(SIGUSR1);
  EXPECT_THAT(refusal<Interrupted>(
                  [&] { Trainer trainer({.run = config, .origins = {}}, device, stop, Log(lines)); }),
              HasSubstr("stopped by SIGUSR1 while reading the training data"));
  EXPECT_FALSE(fs::exists(config.output_dir));
}

}  // namespace
}  // namespace layerstream::test
