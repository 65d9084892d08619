// A resumed run is the uninterrupted one, bit for bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/checkpoint_io.hpp"
#include "run_fixture.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

INSTANTIATE_TEST_SUITE_P(
    Placements, Resume,
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
                                  run.device_activation_blocks = 2;
                                }},
                      Placement{"half_of_each_block_updated_by_the_device",
                                [](RunConfig& run) {
                                  run.optimizer_device_share = 0.6;  // 4096 of 8320
                                  run.gradients_on_host = false;
                                  run.pin_memory = PinMemory::off;
                                  run.numa = "off";
                                }},
                      Placement{"resident_blocks", [](RunConfig& run) { run.resident_blocks = 2; }},
                      Placement{"all_updated_by_the_device",
                                [](RunConfig& run) { run.optimizer_device_share = 1.0; }}),
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
  for (const int operations : {1, 100, 400}) {
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
  EXPECT_THAT(names_in(config.output_dir), ElementsAre("checkpoint-12", "metrics.jsonl", "run.json", "timeline.json"));
}

}  // namespace
}  // namespace layerstream::test
