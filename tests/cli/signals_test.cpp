// SIGTERM and SIGUSR1 in every phase of a run: exit code 75, and a checkpoint as soon as there is something
// to keep.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>

#include "engine/checkpoint_io.hpp"
#include "engine/model_io.hpp"
#include "program_files.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Signals : public ::testing::TestWithParam<int> {
 protected:
  /// Starts a run, sends the signal once standard error holds `line`, and waits for its end.
  ChildResult stopped_at(const std::string& line, const std::vector<std::string>& overrides) {
    Child child(files_.arguments("train", overrides));
    EXPECT_TRUE(child.wait_for(line)) << line;
    child.signal(GetParam());
    const ChildResult result = child.finish();
    EXPECT_EQ(result.killed_by, 0);
    EXPECT_EQ(result.exit_code, exit_code::interrupted) << result.err;
    EXPECT_THAT(result.err, HasSubstr(GetParam() == SIGTERM  ? "SIGTERM"
                                      : GetParam() == SIGINT ? "SIGINT"
                                                             : "SIGUSR1"));
    return result;
  }
  /// Nothing in the output directory but complete checkpoints and metrics.
  std::vector<io::FoundCheckpoint> checkpoints() {
    std::vector<std::string> incomplete;
    const auto found = io::find_checkpoints(files_.path("out"), &incomplete);
    EXPECT_TRUE(incomplete.empty());
    for (const std::string& name : names_in(files_.path("out"))) EXPECT_THAT(name, Not(HasSubstr(".tmp")));
    for (const io::FoundCheckpoint& checkpoint : found) {
      io::CheckpointReader(checkpoint.path, io::Verify::hashes);
    }
    return found;
  }
  void expect_resume(std::int64_t from, std::int64_t to) {
    const ChildResult result =
        files_.run("train", {"resume_from_checkpoint=auto", fmt::format("max_steps={}", to)});
    EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
    EXPECT_THAT(result.err, HasSubstr(fmt::format("at step {} of {}", from, to)));
    EXPECT_EQ(metrics_lines(files_.path("out")).size(), static_cast<std::size_t>(to));
  }
  ProgramFiles files_;
};

INSTANTIATE_TEST_SUITE_P(Slurm, Signals, ::testing::Values(SIGTERM, SIGUSR1), [](const auto& info) {
  return std::string(info.param == SIGTERM ? "SIGTERM" : "SIGUSR1");
});

TEST_P(Signals, WhileReadingDataNothingIsMade) {
  std::string text = text_of_words(1 << 20, 1);
  for (int i = 0; i < 6; ++i) text += text;
  write_text(files_.path("data.txt"), text);  // 64 MiB
  const ChildResult result = stopped_at("kernels: ", {});
  EXPECT_THAT(result.err, HasSubstr("while reading the training data"));
  EXPECT_FALSE(fs::exists(files_.path("out")));
}

/// 10 M parameters: their state takes 0.1 s to make or to read, and longer to write.
nlohmann::ordered_json large_model() {
  auto model = small_model_json();
  model["hidden_size"] = 256;
  model["intermediate_size"] = 1024;
  model["num_hidden_layers"] = 12;
  return model;
}

TEST_P(Signals, WhileWeightsAreMadeOrLoadedNothingIsSaved) {
  files_.write_model(large_model());
  const ChildResult fresh = stopped_at("output: ", {});
  EXPECT_THAT(fresh.err, AllOf(HasSubstr("while loading weights"), Not(HasSubstr("step 1/"))));
  EXPECT_TRUE(checkpoints().empty());

  const ChildResult trained = files_.run("train", {"max_steps=1"});
  ASSERT_EQ(trained.exit_code, exit_code::success) << trained.err;
  const ChildResult resumed = stopped_at("output: ", {"resume_from_checkpoint=auto"});
  EXPECT_THAT(resumed.err, HasSubstr("while loading weights"));
  ASSERT_EQ(checkpoints().size(), 1U);
  expect_resume(1, 2);
}

TEST_P(Signals, DuringTheFirstStepOfTheWarmUpItIsFinishedAndKept) {
  auto model = small_model_json();
  model["num_hidden_layers"] = 8;
  files_.write_model(model);
  write_text(files_.path("data.txt"), text_of_words(400 * 32 - 1, 1));
  // A step of 12,800 tokens takes half a second.
  Child child(
      files_.arguments("train", {"per_device_train_batch_size=400", "chunk_tokens=4096", "warmup_steps=4"}));
  ASSERT_TRUE(child.wait_for("step 1 begins"));
  child.signal(GetParam());
  const ChildResult result = child.finish();
  EXPECT_EQ(result.exit_code, exit_code::interrupted) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("stopped after step 1;"), HasSubstr("resume_from_checkpoint: auto")));
  const auto found = checkpoints();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found.back().step, 1);
}

TEST_P(Signals, WhileTrainingTheStepIsFinishedAndKept) {
  stopped_at("step 3/", {"max_steps=1000000"});
  const auto found = checkpoints();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_GE(found.back().step, 3);
  expect_resume(found.back().step, found.back().step + 2);
}

TEST_P(Signals, WhileSavingTheSaveIsFinished) {
  files_.write_model(large_model());
  // The save of step 1 begins as soon as its line is out.
  const ChildResult result = stopped_at("step 1/", {"save_steps=1", "save_total_limit=2"});
  const auto found = checkpoints();
  ASSERT_FALSE(found.empty());
  EXPECT_LE(found.back().step, 2);
  EXPECT_THAT(result.err, HasSubstr("saved "));
  expect_resume(found.back().step, found.back().step + 1);
}

TEST_P(Signals, WhileEvaluatingTheStepIsKeptAndAResumeBeginsWithTheEvaluation) {
  // 600 rows take seconds, where a step takes milliseconds.
  write_text(files_.path("held-out.txt"), text_of_words(600 * 32 - 1, 2));
  auto model = small_model_json();
  model["num_hidden_layers"] = 8;
  files_.write_model(model);
  RunConfig run = files_.config();
  run.validation_file = {files_.path("held-out.txt").string()};
  run.eval_strategy = EvalStrategy::steps;
  run.eval_steps = 2;
  files_.write_config(run);
  const ChildResult stopped = stopped_at("step 2/", {});
  EXPECT_THAT(stopped.err, HasSubstr("the evaluation of step 2 is left out"));
  ASSERT_EQ(checkpoints().size(), 1U);
  EXPECT_EQ(checkpoints().back().step, 2);
  const ChildResult resumed = files_.run("train", {"resume_from_checkpoint=auto", "max_steps=3"});
  EXPECT_EQ(resumed.exit_code, exit_code::success) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("step 2  eval loss "));
}

/// What the rest of a run depends on, of its last checkpoint: weights, moments, and where it stands.
std::map<std::string, std::string> end_state(const fs::path& output_dir) {
  std::map<std::string, std::string> state;
  const auto newest = io::newest_complete(output_dir);
  if (!newest) return state;
  const io::CheckpointReader checkpoint(newest->path);
  for (const io::CheckpointFile& file : checkpoint.files()) {
    if (file.name == "run.yaml") continue;  // says how the process was started
    state[file.name] = read_text(newest->path / file.name);
  }
  return state;
}

TEST(InterruptedAnywhere, ARunThatIsKilledAndStoppedAgainAndAgainEndsWithTheSameBits) {
  ProgramFiles files;
  write_text(files.path("held-out.txt"), text_of_words(40 * 32 - 1, 2));
  RunConfig run = files.config();
  run.max_steps = 60;
  run.save_steps = 3;
  run.save_total_limit = 2;
  run.validation_file = {files.path("held-out.txt").string()};
  run.eval_strategy = EvalStrategy::steps;
  run.eval_steps = 3;
  run.skip_loss_zscore = 3;
  files.write_config(run);
  const fs::path straight = files.path("straight");
  ASSERT_EQ(files.run("train", {"output_dir=" + straight.string()}).exit_code, exit_code::success);

  // Later and later, so that every phase of a process is hit, and the run gets on.
  constexpr auto longer = std::chrono::milliseconds(17);
  std::chrono::milliseconds lifetime{20};
  int interruptions = 0;
  for (bool done = false; !done; ++interruptions, lifetime += longer) {
    ASSERT_LT(interruptions, 500);
    Child child(files.arguments("train", {"resume_from_checkpoint=auto"}));
    child.read_for(lifetime);
    child.signal(interruptions % 3 == 2 ? SIGTERM : SIGKILL);
    const ChildResult result = child.finish();
    if (result.killed_by == SIGKILL || result.killed_by == SIGTERM)
      continue;  // the latter before it is handled
    done = result.exit_code == exit_code::success;
    if (!done) {
      ASSERT_EQ(result.exit_code, exit_code::interrupted) << result.err;
    }
  }
  EXPECT_GT(interruptions, 5);
  const auto expected = end_state(straight);
  ASSERT_GE(expected.size(), 5U);
  EXPECT_EQ(end_state(files.path("out")), expected);
}

TEST(KilledWhileSaving, TheNewestCompleteCheckpointResumes) {
  ProgramFiles files;
  files.write_model(large_model());
  Child child(files.arguments("train", {"save_steps=1"}));
  ASSERT_TRUE(child.wait_for("saved "));
  ASSERT_TRUE(child.wait_for("step 2/"));
  child.signal(SIGKILL);
  EXPECT_EQ(child.finish().killed_by, SIGKILL);
  const auto newest = io::newest_complete(files.path("out"));
  ASSERT_TRUE(newest);
  const ChildResult result =
      files.run("train", {"resume_from_checkpoint=auto", fmt::format("max_steps={}", newest->step + 1)});
  EXPECT_EQ(result.exit_code, exit_code::success) << result.err;
  EXPECT_THAT(result.err, HasSubstr(fmt::format("at step {} of", newest->step)));
  for (const std::string& name : names_in(files.path("out"))) EXPECT_THAT(name, Not(HasSubstr(".tmp")));
}

}  // namespace
}  // namespace layerstream::test
