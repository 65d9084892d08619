#include <gmock/gmock.h>

#include <cmath>

#include "engine/checkpoint_keeper.hpp"
#include "engine/outliers.hpp"
#include "run_fixture.hpp"

namespace layerstream {
namespace {

namespace fs = std::filesystem;
using test::RunFiles;
using test::TestRun;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class Evaluation : public ::testing::Test {
 protected:
  Evaluation() { test::write_text(files_.path("held-out.txt"), test::text_of_words(7 * 32 - 1, 9)); }

  RunConfig config(const std::string& output = "out") const {
    RunConfig run = files_.config(output);
    run.validation_file = {files_.path("held-out.txt").string()};
    run.eval_strategy = EvalStrategy::steps;
    run.eval_steps = 4;
    return run;
  }

  std::vector<nlohmann::json> evaluations(const RunConfig& run) const {
    std::vector<nlohmann::json> found;
    std::istringstream lines(test::read_text(fs::path(run.output_dir) / "metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const auto json = nlohmann::json::parse(line);
      if (json.contains("eval_loss")) found.push_back(json);
    }
    return found;
  }

  /// Of a run that has stopped early, to go on.
  RunConfig stopped_early() const {
    RunConfig run = config();
    run.eval_steps = 2;
    run.early_stopping_patience = 2;
    run.early_stopping_threshold = 100.0;
    TestRun(run)->run();
    run.resume_from_checkpoint = "auto";
    return run;
  }

  RunFiles files_;
};

TEST_F(Evaluation, IsTheMeanOverTheHeldOutTargetsWhateverTheBatch) {
  std::vector<double> losses;
  for (const std::int64_t rows : {1, 2, 4}) {
    RunConfig run = config(fmt::format("out-{}", rows));
    run.per_device_train_batch_size = rows;
    run.gradient_accumulation_steps = 4 / rows;
    run.eval_on_start = true;
    run.max_steps = 1;
    TestRun trained(run);
    // Before the first step the weights are the same whatever the batch.
    trained->evaluate_if_due();
    double nll = 0.0;
    std::int64_t targets = 0;
    const io::Dataset held_out = [&] {
      io::DatasetOptions options = io::dataset_options(run, 260);
      options.inputs = run.validation_file;
      return io::Dataset::load(options);
    }();
    for (std::int64_t i = 0; i < held_out.num_rows(); ++i) {
      const TokenRow row = held_out.row(i);
      nll += trained->engine().evaluate({&row, 1});
      targets += held_out.row_targets(i);
    }
    ASSERT_EQ(trained->state().evaluation.last->step, 0);
    losses.push_back(trained->state().evaluation.last->loss);
    // One row at a time goes through products of other shapes: fp32's rounding, averaged over 200 targets.
    EXPECT_NEAR(losses.back(), nll / static_cast<double>(targets), 1e-7 * losses.back());
    // 7 rows in batches of 4, 2 and 1: sums in another order.
    EXPECT_NEAR(losses.back(), losses.front(), 1e-12 * losses.front());
    const auto lines = evaluations(run);
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_EQ(lines[0].at("eval_loss").get<double>(), losses.back());
    EXPECT_DOUBLE_EQ(lines[0].at("eval_perplexity").get<double>(), std::exp(losses.back()));
    EXPECT_EQ(lines[0].at("eval_rows"), held_out.num_rows());
  }
}

TEST_F(Evaluation, ChangesNoBitOfTheTraining) {
  RunConfig plain = files_.config("plain");
  TestRun without(plain);
  without->run();
  RunConfig often = config("often");
  often.eval_steps = 1;
  often.eval_on_start = true;
  TestRun with(often);
  with->run();
  EXPECT_EQ(with.slabs(), without.slabs());
  EXPECT_EQ(evaluations(often).size(), 13u);
}

TEST_F(Evaluation, ComesWhenTheKeysSayAndAtTheEnd) {
  const auto steps = [&](const RunConfig& run) {
    TestRun(run)->run();
    std::vector<std::int64_t> found;
    for (const auto& line : evaluations(run)) found.push_back(line.at("step").get<std::int64_t>());
    return found;
  };
  RunConfig run = config("steps");
  run.eval_steps = 5;
  EXPECT_THAT(steps(run), ElementsAre(5, 10, 12));
  run = config("epochs");
  run.eval_strategy = EvalStrategy::epoch;
  EXPECT_THAT(steps(run), ElementsAre(5, 10, 12));
  run = config("start");
  run.eval_on_start = true;
  run.eval_strategy = EvalStrategy::no;
  EXPECT_THAT(steps(run), ElementsAre(0));
  run = config("few");
  run.max_eval_samples = 3;
  EXPECT_THAT(steps(run), ElementsAre(4, 8, 12));
  EXPECT_EQ(evaluations(run)[0].at("eval_rows"), 3);
}

TEST_F(Evaluation, TheBestCheckpointStaysAndHasAName) {
  RunConfig run = config();
  run.learning_rate = 0.3;  // it learns, and then diverges
  run.lr_scheduler_type = SchedulerType::constant;
  run.max_grad_norm = 0;
  run.eval_steps = 1;
  run.save_steps = 1;
  run.save_total_limit = 1;
  run.save_major_steps = 5;
  TestRun trained(run);
  trained->run();
  const auto best = trained->state().evaluation.best;
  ASSERT_TRUE(best);
  ASSERT_LT(best->step, 12);
  EXPECT_EQ(trained->state().evaluation.best_checkpoint, best);
  std::vector<std::int64_t> left;
  for (const auto& found : io::find_checkpoints(run.output_dir)) left.push_back(found.step);
  std::vector<std::int64_t> expected{5, 10, 12, best->step};
  std::ranges::sort(expected);
  expected.erase(std::unique(expected.begin(), expected.end()), expected.end());
  EXPECT_EQ(left, expected);
  const fs::path link = fs::path(run.output_dir) / io::best_name;
  EXPECT_EQ(io::CheckpointReader(link, io::Verify::hashes).step(), best->step);
  EXPECT_THAT(trained.log(), HasSubstr("best checkpoint: " + link.string()));
}

TEST_F(Evaluation, SaveStrategyBestSavesWhatIsBetterThanAllBefore) {
  RunConfig run = config();
  run.save_strategy = SaveStrategy::best;
  run.eval_steps = 3;
  TestRun(run)->run();
  double best = std::numeric_limits<double>::infinity();
  std::vector<std::int64_t> expected;
  for (const auto& line : evaluations(run)) {
    if (line.at("eval_loss").get<double>() >= best && line.at("step") != 12) continue;
    best = std::min(best, line.at("eval_loss").get<double>());
    expected.push_back(line.at("step").get<std::int64_t>());
  }
  std::vector<std::int64_t> saved;
  for (const auto& found : io::find_checkpoints(run.output_dir)) saved.push_back(found.step);
  EXPECT_EQ(saved, expected);
  EXPECT_GE(saved.size(), 2u);
}

TEST_F(Evaluation, ARunEndsEarlyWithoutAGainAndAResumeLeavesItEnded) {
  RunConfig run = config();
  run.eval_steps = 2;
  run.early_stopping_patience = 2;
  run.early_stopping_threshold = 100.0;  // only the first is a gain
  TestRun trained(run);
  const TrainingEnd end = trained->run();
  EXPECT_EQ(end.global_step, 6);
  EXPECT_FALSE(end.interrupted);
  EXPECT_THAT(trained.log(), HasSubstr("early stop: 2 evaluations in a row"));
  run.resume_from_checkpoint = "auto";
  TestRun resumed(run);
  EXPECT_TRUE(resumed->done());
  EXPECT_EQ(resumed->run().global_step, 6);
}

TEST_F(Evaluation, AnInterruptedRunResumesToTheSameEnd) {
  RunConfig straight = config("straight");
  straight.eval_steps = 2;
  straight.save_steps = 1;
  straight.early_stopping_patience = 5;
  TestRun expected(straight);
  expected->run();
  for (int stop_at = 1; stop_at < 12; ++stop_at) {
    RunConfig run = straight;
    run.output_dir = files_.path(fmt::format("out-{}", stop_at)).string();
    {
      TestRun first(run);
      while (first->state().global_step < stop_at) {
        first->step();
        if (first->state().global_step < stop_at) first->evaluate_if_due();
      }
      // A stop request comes before the evaluation of this step.
      first.stop().request();
      first->evaluate_if_due();
      first->save();
    }
    run.resume_from_checkpoint = "auto";
    TestRun resumed(run);
    resumed->run();
    EXPECT_EQ(resumed.slabs(), expected.slabs()) << stop_at;
    TrainerState state = resumed->state();
    state.evaluation.best_checkpoint = expected->state().evaluation.best_checkpoint;
    EXPECT_EQ(state, expected->state()) << stop_at;
    std::vector<double> losses, expected_losses;
    for (const auto& line : evaluations(run)) losses.push_back(line.at("eval_loss").get<double>());
    for (const auto& line : evaluations(straight))
      expected_losses.push_back(line.at("eval_loss").get<double>());
    EXPECT_EQ(losses, expected_losses) << stop_at;
  }
}

TEST_F(Evaluation, AnEarlyStopIsLiftedByMorePatience) {
  RunConfig run = stopped_early();
  run.early_stopping_patience = 4;
  TestRun resumed(run);
  EXPECT_FALSE(resumed->done());
  EXPECT_EQ(resumed->run().global_step, 10);
}

TEST_F(Evaluation, ARunThatStoppedEarlyNeedsNoRoomForCheckpoints) {
  RunConfig run = stopped_early();
  run.max_steps = 2'000'000'000;
  run.save_steps = 1;
  TestRun resumed(run);
  EXPECT_TRUE(resumed->done());
  run.early_stopping_patience = 4;
  EXPECT_THROW(TestRun goes_on(run), ResourceError);
}

TEST_F(Evaluation, ABestCheckpointThatCannotBeReadStaysTheBest) {
  RunConfig run = config();
  run.max_steps = 8;
  run.save_steps = 4;
  TestRun trained(run);
  trained->run();
  TrainerState state = trained->state();
  state.evaluation.best_checkpoint->step = 4;
  const fs::path manifest = fs::path(run.output_dir) / "checkpoint-4" / "manifest.json";
  ASSERT_TRUE(fs::exists(manifest));
  fs::remove(manifest);
  std::ostringstream lines;
  const std::string model;
  const CheckpointKeeper keeper(run, model, Log(lines));
  keeper.forget_absent_best(state.evaluation);
  ASSERT_TRUE(state.evaluation.best_checkpoint);
  EXPECT_EQ(state.evaluation.best_checkpoint->step, 4);
  EXPECT_THAT(lines.str(), HasSubstr("the best checkpoint, of step 4, cannot be read now"));
}

TEST_F(Evaluation, InAnotherOutputDirectoryTheBestOfThoseSavedThereCounts) {
  RunConfig run = config();
  run.max_steps = 8;
  TestRun(run)->run();
  run.resume_from_checkpoint = files_.path("out/checkpoint-8").string();
  run.output_dir = files_.path("elsewhere").string();
  run.max_steps = 12;
  run.learning_rate = 0.3;  // so that what is saved there is worse
  run.lr_scheduler_type = SchedulerType::constant;
  run.max_grad_norm = 0;
  TestRun resumed(run);
  EXPECT_THAT(resumed.log(),
              HasSubstr("the best checkpoint, of step 8, is not in output_dir " + run.output_dir));
  resumed->run();
  ASSERT_EQ(resumed->state().evaluation.best->step, 8);
  EXPECT_EQ(io::CheckpointReader(fs::path(run.output_dir) / io::best_name).step(), 12);
}

TEST_F(Evaluation, WithoutHeldOutDataAResumeKeepsTheBestCheckpoint) {
  RunConfig run = config();
  run.save_steps = 4;
  run.save_total_limit = 1;
  run.max_steps = 4;
  TestRun(run)->run();
  run = files_.config();
  run.resume_from_checkpoint = "auto";
  run.save_steps = 2;
  run.save_total_limit = 1;
  TestRun(run)->run();
  std::vector<std::int64_t> left;
  for (const auto& found : io::find_checkpoints(run.output_dir)) left.push_back(found.step);
  EXPECT_THAT(left, ElementsAre(4, 12));
  EXPECT_EQ(io::CheckpointReader(fs::path(run.output_dir) / io::best_name).step(), 4);
}

TEST(TrainerStateText, KeepsEvenALossThatIsNotFinite) {
  TrainerState state{.global_step = 7};
  state.recent_losses.add(1.0 / 3.0);
  state.evaluation = {.last = EvaluatedStep{.step = 7, .loss = std::nan("")},
                      .best = EvaluatedStep{.step = 3, .loss = 0.1},
                      .best_checkpoint = {},
                      .without_gain = 2,
                      .data_hash = ~std::uint64_t{0},
                      .num_rows = 9};
  TrainerState read = trainer_state_from_json(to_json(state), "state");
  ASSERT_TRUE(read.evaluation.last);
  EXPECT_EQ(read.evaluation.last->step, 7);
  EXPECT_TRUE(std::isnan(read.evaluation.last->loss));
  read.evaluation.last = state.evaluation.last = {};
  EXPECT_EQ(read, state);
}

TEST_F(Evaluation, OtherHeldOutDataForgetsTheBest) {
  RunConfig run = config();
  run.save_steps = 4;
  run.max_steps = 4;
  TestRun(run)->run();
  test::write_text(files_.path("held-out.txt"), test::text_of_words(6 * 32, 10));
  run.max_steps = 8;
  run.resume_from_checkpoint = "auto";
  TestRun resumed(run);
  EXPECT_FALSE(resumed->state().evaluation.best);
  EXPECT_THAT(resumed.log(), HasSubstr("evaluations are forgotten"));
}

TEST_F(Evaluation, MissingHeldOutDataIsRefusedByItsKey) {
  RunConfig run = config();
  run.validation_file = {files_.path("absent.txt").string()};
  EXPECT_THAT(test::message_of<FileError>([&] { TestRun{run}; }),
              AllOf(HasSubstr("validation_file"), HasSubstr("absent.txt"), HasSubstr("does not exist")));
}

TEST(RecentValues, TellHowFarAValueStandsOut) {
  RecentValues recent;
  for (std::size_t i = 0; i < RecentValues::window; ++i) {
    EXPECT_FALSE(recent.zscore(1e9)) << i;
    recent.add(i % 2 == 0 ? 1.0 : 3.0);
  }
  EXPECT_DOUBLE_EQ(*recent.zscore(5.0), 3.0);
  EXPECT_DOUBLE_EQ(*recent.zscore(2.0), 0.0);
  EXPECT_DOUBLE_EQ(*recent.zscore(0.0), -2.0);
  for (std::size_t i = 0; i < RecentValues::window; ++i) recent.add(7.0);
  EXPECT_EQ(*recent.zscore(7.0), 0.0);
  EXPECT_TRUE(std::isinf(*recent.zscore(7.5)));
  EXPECT_EQ(recent.values().size(), RecentValues::window);
}

TEST_F(Evaluation, AnOutlierStepChangesNothingAndAResumeKnowsTheWindow) {
  RunConfig run = files_.config();
  run.max_steps = 140;
  // Weights that hardly move: norms scatter about a mean, and many lie half a deviation above it.
  run.learning_rate = 1e-9;
  run.lr_scheduler_type = SchedulerType::constant;
  run.skip_grad_norm_zscore = 0.5;
  run.max_skipped_steps = 1000;
  TestRun trained(run);
  std::vector<std::vector<std::uint8_t>> before;
  std::int64_t left_out = 0;
  while (!trained->done()) {
    if (trained->state().global_step == 130) trained->save();
    before = trained.slabs();
    const StepResult result = trained->step();
    if (trained->state().global_step <= 128) {
      EXPECT_TRUE(result.applied);
    }
    EXPECT_EQ(trained.slabs() == before, !result.applied);
    left_out += result.applied ? 0 : 1;
  }
  EXPECT_GT(left_out, 0);
  EXPECT_LT(left_out, 12);
  EXPECT_EQ(trained->state().applied_steps, 140 - left_out);
  // The window travels with the checkpoint.
  run.resume_from_checkpoint = (fs::path(run.output_dir) / "checkpoint-130").string();
  TestRun resumed(run);
  resumed->run();
  EXPECT_EQ(resumed.slabs(), trained.slabs());
  EXPECT_EQ(resumed->state(), trained->state());
  EXPECT_THAT(resumed.log(), HasSubstr("standard deviations above the last 128 (skip_grad_norm_zscore"));
}

}  // namespace
}  // namespace layerstream
