// A running model is placed anew between steps on request: nothing of the result changes, and no state is
// lost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <set>

#include "core/config_schema.hpp"
#include "engine/replan.hpp"
#include "run_fixture.hpp"
#include "tests/backends/forwarding_device.hpp"
#include "tests/support/thread_limit.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

// --- requests ---

TEST(ReplanRequest, TakesPlacementAndLimitsAndNothingElse) {
  const RunConfig defaults;
  std::set<std::string> allowed;
  for (const ConfigField& field : config_schema()) {
    const std::string line = fmt::format("{}: {}\n", field.key, field.show(defaults));
    try {
      const LoadedConfig request = parse_replan_request(line, "replan.yaml");
      EXPECT_EQ(request.origin_of(field.key), "replan.yaml:1");
      allowed.emplace(field.key);
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr(std::string(field.key) + " (replan.yaml:1) cannot be re-planned"),
                        HasSubstr("Keys that can be:")));
    }
  }
  for (const char* const key :
       {"hardware_profile", "weight_slots", "loop_order", "activation_policy", "activation_blocks",
        "activation_chunks", "device_activation_blocks", "optimizer_device_share", "resident_blocks",
        "gradient_home", "device_memory_limit", "host_memory_limit", "optimizer_threads", "pin_memory"}) {
    EXPECT_TRUE(allowed.contains(key)) << key;
  }
  for (const char* const key :
       {"learning_rate", "compute_dtype", "rope", "chunk_tokens", "loss_tile_tokens", "seed", "deterministic",
        "backend", "optimizer_update", "numa", "output_dir", "max_steps"}) {
    EXPECT_FALSE(allowed.contains(key)) << key;
  }
}

TEST(ReplanRequest, RefusesWhatAConfigurationRefuses) {
  const auto refused = [](std::string_view yaml) {
    return message_of<ConfigError>([&] { parse_replan_request(yaml, "replan.yaml"); });
  };
  EXPECT_THAT(refused("resident_block: 2\n"),
              AllOf(HasSubstr("replan.yaml:1"), HasSubstr("resident_blocks")));
  EXPECT_THAT(refused("weight_slots: 0\n"), HasSubstr("integer 1 to 1024"));
  EXPECT_THAT(refused("weight_slots: [\n"), HasSubstr("not valid YAML"));
  EXPECT_THAT(refused(""), HasSubstr("nothing is to be re-planned"));
}

TEST(ReplanRequest, ChangesTheKeysThatItGivesAndGivesBackThoseThatAreNull) {
  LoadedConfig running;
  running.run.weight_slots = 3;
  running.run.resident_blocks = 1;
  running.run.host_memory_limit = 1000;
  running.run.learning_rate = 0.25;
  running.run.hardware_profile = "h200";
  const LoadedConfig request =
      parse_replan_request("", "replan",
                           std::vector<std::string>{"weight_slots=null", "resident_blocks=2",
                                                    "host_memory_limit=24GiB", "hardware_profile="});
  const LoadedConfig changed = with_request(running, request);
  EXPECT_FALSE(changed.run.weight_slots);
  EXPECT_EQ(changed.run.resident_blocks, 2);
  EXPECT_EQ(changed.run.host_memory_limit, std::uint64_t{24} << 30);
  EXPECT_EQ(changed.run.hardware_profile, "");
  EXPECT_EQ(changed.run.learning_rate, 0.25);
  EXPECT_EQ(changed.origin_of("resident_blocks"), "--set");
}

// --- the run ---

LoadedConfig request(const std::vector<std::string>& assignments) {
  return parse_replan_request("", "replan", assignments);
}

class Replan : public ::testing::Test {
 protected:
  /// Six steps, streaming all of it wherever the planner would have put it.
  RunConfig config(const std::string& output = "out") const {
    RunConfig run = files_.config(output);
    run.max_steps = 6;
    return with_default_placement(run, *make_test_device(0));
  }
  fs::path output(const std::string& name) const { return fs::path(config().output_dir) / name; }
  void ask(const std::vector<std::string>& assignments) {
    ReplanRequests(config().output_dir).submit(request(assignments));
  }
  Outcome straight() { return train_to_the_end(config("straight")); }
  RunFiles files_;
};

TEST_F(Replan, TwiceInARunChangesNoBitOfIt) {
  TestRun run(config());
  run->step();
  run->step();
  const std::size_t first_size = run->engine().ledger().total(Space::host);
  ask({"resident_blocks=2", "weight_slots=1", "gradient_home=device", "optimizer_device_share=0.5"});
  run->replan_if_asked();
  EXPECT_EQ(run->engine().shape().schedule.device_update.resident_blocks, 2);
  EXPECT_EQ(run->engine().shape().schedule.weight_slots, 1);
  EXPECT_TRUE(fs::exists(output("replan.applied.yaml")));
  EXPECT_FALSE(fs::exists(output("replan.yaml")));
  const std::size_t second_size = run->engine().ledger().total(Space::host);
  EXPECT_LT(second_size, first_size);
  run->step();
  run->step();
  ask({"activation_policy=all", "device_activation_blocks=0", "resident_blocks=null", "gradient_home=host",
       "optimizer_threads=2"});
  run->replan_if_asked();
  EXPECT_NE(run->engine().shape().schedule.device_update.resident_blocks, 2) << "given back";
  // Where the planner knows the device no block may be left to stream.
  EXPECT_EQ(run->engine().shape().schedule.weight_slots,
            std::min(1, run->engine().shape().schedule.num_streamed_blocks()))
      << "as it was asked for before";
  EXPECT_EQ(run->engine().pool().num_threads(), 2);
  EXPECT_GT(run->engine().ledger().total(Space::host), first_size);
  EXPECT_FALSE(run->run().interrupted);
  EXPECT_TRUE(outcome(run, config()) == straight());
  EXPECT_THAT(run.log(),
              AllOf(HasSubstr("re-plan after step 2: placed anew"),
                    HasSubstr("re-plan after step 4: placed anew"), HasSubstr("saved intermediates")));
}

TEST_F(Replan, IsLookedForBetweenTheStepsOfARun) {
  /// Asks during the second step.
  class Asking final : public ExecutionObserver {
   public:
    explicit Asking(std::function<void()> ask) : ask_(std::move(ask)) {}
    void begin(const Schedule& schedule) override {
      if (schedule.step == 2) ask_();
    }
    void before(int, const Operation&) override {}
    void after(int, const Operation&) override {}

   private:
    std::function<void()> ask_;
  } asking([&] { ask({"resident_blocks=3"}); });
  TestRun run(config(), {.observer = &asking});
  run->run();
  EXPECT_THAT(run.log(), HasSubstr("re-plan after step 2: placed anew"));
  EXPECT_EQ(run->engine().shape().schedule.device_update.resident_blocks, 3);
  EXPECT_TRUE(outcome(run, config()) == straight());
}

TEST_F(Replan, WhatCannotBeIsRefusedAndTheRunIsAsItWas) {
  TestRun run(config());
  run->step();
  const Engine* const engine = &run->engine();
  const std::string before = run->engine().ledger().to_table();
  const auto refused = [&](const std::string& yaml) {
    const std::size_t known = run.log().size();
    write_text(output("replan.yaml"), yaml);
    run->replan_if_asked();
    EXPECT_EQ(&run->engine(), engine);
    EXPECT_EQ(run->engine().ledger().to_table(), before);
    EXPECT_FALSE(fs::exists(output("replan.yaml")));
    EXPECT_FALSE(fs::exists(output("replan.taken.yaml")));
    EXPECT_EQ(read_text(output("replan.refused.yaml")), yaml);
    fs::remove(output("replan.refused.yaml"));
    return run.log().substr(known);
  };
  EXPECT_THAT(refused("device_memory_limit: 64KiB\n"),
              AllOf(HasSubstr("re-plan after step 1 refused, the run goes on as it was"),
                    HasSubstr("device memory: need")));
  EXPECT_THAT(refused("host_memory_limit: 1MiB\n"), HasSubstr("host memory: need"));
  EXPECT_THAT(refused("weight_slots: 0\n"), HasSubstr("integer 1 to 1024"));
  EXPECT_THAT(refused("learning_rate: 1\n"), HasSubstr("learning_rate (replan.yaml:1) cannot be re-planned"));
  EXPECT_THAT(refused("hardware_profile: abacus\n"), HasSubstr("abacus is no file and no shipped profile"));
  EXPECT_THAT(refused("hardware_profile: " + std::string(5000, 'x') + "\n"),
              AllOf(HasSubstr("no file that can be looked for"), HasSubstr("too long")));
  fs::create_directory_symlink("loop", files_.path("loop"));
  EXPECT_THAT(refused("hardware_profile: " + files_.path("loop/of.yaml").string() + "\n"),
              HasSubstr("no file that can be looked for"));
  EXPECT_THAT(refused("hardware_profile: " + files_.path("model").string() + "\n"),
              HasSubstr("cannot be read"));
  EXPECT_THAT(refused("resident_blocks: [\n"), HasSubstr("not valid YAML"));
  EXPECT_THAT(refused(""), HasSubstr("nothing is to be re-planned"));
  // The refused limits hold no longer.
  ask({"resident_blocks=1"});
  run->replan_if_asked();
  EXPECT_EQ(run->engine().shape().schedule.device_update.resident_blocks, 1);
  run->run();
  EXPECT_TRUE(outcome(run, config()) == straight());
}

TEST_F(Replan, ContradictionsWithTheRestOfTheConfigurationAreRefused) {
  RunConfig immediate = config();
  immediate.optimizer_update = OptimizerUpdate::immediate;
  immediate.max_grad_norm = 0.0;
  immediate.optimizer_device_share = 0.0;
  TestRun run(immediate);
  run->step();
  ask({"resident_blocks=1"});
  run->replan_if_asked();
  EXPECT_THAT(run.log(), HasSubstr("immediate updates are the host's alone"));
  EXPECT_TRUE(fs::exists(output("replan.refused.yaml")));
  run->step();
}

TEST_F(Replan, WithRatesThePlannerDecidesWhatIsLeftOpen) {
  TestRun run(config());
  run->step();
  ask({"hardware_profile=h200-pcie5-128g", "resident_blocks=null"});
  run->replan_if_asked();
  EXPECT_THAT(run.log(), AllOf(HasSubstr("placements simulated with the rates of h200-pcie5-128g"),
                               HasSubstr("placed anew")));
  EXPECT_EQ(run->engine().shape().schedule.device_update.resident_blocks, 5) << "all fit";
  run->run();
  EXPECT_TRUE(outcome(run, config()) == straight());
}

TEST_F(Replan, ALimitAloneMovesNothingThatFits) {
  TestRun run(config());
  run->step();
  const Engine* const engine = &run->engine();
  const std::size_t limit = make_test_device(0)->overhead_bytes() + (std::size_t{512} << 20);
  ask({fmt::format("device_memory_limit={}", limit)});
  run->replan_if_asked();
  EXPECT_EQ(&run->engine(), engine);
  EXPECT_THAT(run.log(), HasSubstr("the placement stays what it is"));
  EXPECT_TRUE(fs::exists(output("replan.applied.yaml")));
}

TEST_F(Replan, ARequestToAProcessThatHasEndedIsSetAside) {
  write_text(output("replan.yaml"), "resident_blocks: 2\n");
  TestRun run(config());
  EXPECT_THAT(run.log(), HasSubstr("meant for a process that has ended"));
  EXPECT_TRUE(fs::exists(output("replan.refused.yaml")));
  run->run();
  EXPECT_EQ(run->engine().shape().schedule.device_update.resident_blocks, 0);
}

TEST_F(Replan, ALaterRequestTakesThePlaceOfOneThatWaits) {
  TestRun run(config());
  ReplanRequests requests(config().output_dir);
  EXPECT_FALSE(requests.submit(request({"resident_blocks=1"})));
  EXPECT_TRUE(requests.submit(request({"weight_slots=1"})));
  EXPECT_EQ(read_text(output("replan.yaml")), "weight_slots: 1\n");
  EXPECT_THAT(names_in(config().output_dir), Not(Contains(HasSubstr(".tmp"))));
}

TEST_F(Replan, WhereNoRunIsNothingIsWritten) {
  ReplanRequests absent(files_.path("nowhere"));
  EXPECT_THAT(message_of<ConfigError>([&] { absent.submit(request({"weight_slots=1"})); }),
              AllOf(HasSubstr("nowhere"), HasSubstr("no run is there")));
  EXPECT_FALSE(fs::exists(files_.path("nowhere")));
  ReplanRequests other(files_.path("model"));
  EXPECT_THROW(other.submit(request({"weight_slots=1"})), ConfigError);
  EXPECT_EQ(names_in(files_.path("model")).size(), 1U);
}

// --- when the new placement cannot be had after all ---

/// Another process takes the device's memory, or a signal comes, at a given allocation.
class FailingDevice final : public ForwardingDevice {
 public:
  FailingDevice() : ForwardingDevice(make_test_device(std::size_t{1} << 30)) {}
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override {
    if (failures_ > 0) {
      --failures_;
      throw ResourceError("another process was faster");
    }
    return ForwardingDevice::allocate(bytes);
  }
  std::unique_ptr<HostPin> pin(void* data, std::size_t bytes, bool required,
                               const std::function<void(std::size_t, std::size_t)>& progress) override {
    if (stop_ != nullptr) stop_->request(SIGTERM);
    if (progress) progress(bytes, bytes);
    return ForwardingDevice::pin(data, bytes, required, progress);
  }
  std::size_t attainable_memory() const override {
    if (is_unwell_) throw std::runtime_error("no error of this program's");
    return ForwardingDevice::attainable_memory();
  }
  void fail(int times) { failures_ = times; }
  void be_unwell(bool is_unwell) { is_unwell_ = is_unwell; }
  void stop(StopRequest& stop) { stop_ = &stop; }

 private:
  int failures_ = 0;
  bool is_unwell_ = false;
  StopRequest* stop_ = nullptr;
};

class FailedReplan : public Replan {
 protected:
  Trainer& start() {
    trainer_ =
        std::make_unique<Trainer>(LoadedConfig{.run = config(), .origins = {}}, device_, stop_, Log(lines_));
    for (int i = 0; i < 3; ++i) trainer_->step();
    ask({"resident_blocks=2", "activation_policy=all"});
    return *trainer_;
  }
  Outcome resumed() {
    RunConfig run = config();
    run.resume_from_checkpoint = "auto";
    return train_to_the_end(run);
  }
  FailingDevice device_;
  StopRequest stop_;
  std::ostringstream lines_;
  std::unique_ptr<Trainer> trainer_;
};

TEST_F(FailedReplan, WhateverIsThrownWhileARequestIsExaminedRefusesIt) {
  Trainer& trainer = start();
  const Engine* const engine = &trainer.engine();
  ask({"device_memory_limit=16MiB", "resident_blocks=2"});
  device_.be_unwell(true);
  trainer.replan_if_asked();
  device_.be_unwell(false);
  EXPECT_EQ(&trainer.engine(), engine);
  EXPECT_THAT(lines_.str(), HasSubstr("refused, the run goes on as it was: no error of this program's"));
  EXPECT_TRUE(fs::exists(output("replan.refused.yaml")));
  trainer.run();
  trainer.engine().apply_pending();
  EXPECT_TRUE(slab_bytes(trainer.engine().parameters()) == straight().slabs);
}

TEST_F(FailedReplan, GoesBackToTheFormerPlacement) {
  Trainer& trainer = start();
  device_.fail(1);
  trainer.replan_if_asked();
  EXPECT_EQ(trainer.engine().shape().schedule.device_update.resident_blocks, 0);
  EXPECT_THAT(lines_.str(), AllOf(HasSubstr("another process was faster; back to the former placement"),
                                  HasSubstr("refused, the run goes on as it was")));
  EXPECT_TRUE(fs::exists(output("replan.refused.yaml")));
  trainer.run();
  trainer.engine().apply_pending();
  EXPECT_TRUE(slab_bytes(trainer.engine().parameters()) == straight().slabs);
}

TEST_F(FailedReplan, WithoutAWayBackTheStateGoesToACheckpoint) {
  Trainer& trainer = start();
  device_.fail(2);
  EXPECT_THAT(message_of<Error>([&] { trainer.run(); }),
              AllOf(HasSubstr("re-plan after step 3 failed: another process was faster; and no way back"),
                    HasSubstr("checkpoint-3 is the newest checkpoint")));
  trainer_.reset();
  EXPECT_TRUE(resumed() == straight());
}

TEST_F(FailedReplan, WhereNoCheckpointCanBeWrittenTheNewestIsNamed) {
  Trainer& trainer = start();
  trainer.save();
  trainer.step();
  device_.fail(2);
  // No file may grow beyond this.
  struct rlimit whole {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &whole), 0);
  const auto former = ::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { .rlim_cur = 4096, .rlim_max = whole.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message = message_of<Error>([&] { trainer.replan_if_asked(); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &whole), 0);
  ::signal(SIGXFSZ, former);
  EXPECT_THAT(message, AllOf(HasSubstr("re-plan after step 4 failed: another process was faster"),
                             HasSubstr("the checkpoint of step 4 could not be written"),
                             HasSubstr("checkpoint-3 is the newest checkpoint")));
}

TEST_F(FailedReplan, ThreadsThatCannotBeStartedLeaveTheFormerPlacement) {
#ifdef LAYERSTREAM_TEST_ON_GPU
  GTEST_SKIP() << "the limit of address space would bind the driver as well";
#endif
  Trainer& trainer = start();
  ask({"optimizer_threads=64"});
  {
    // Enough for the former engine.
    const ThreadLimit limit(16);
    trainer.replan_if_asked();
  }
  EXPECT_THAT(lines_.str(), AllOf(HasSubstr("of 63 threads could be started"),
                                  HasSubstr("refused, the run goes on as it was")));
  trainer.run();
  trainer.engine().apply_pending();
  EXPECT_TRUE(slab_bytes(trainer.engine().parameters()) == straight().slabs);
}

/// Not even that of a heartbeat, which a save has as well.
TEST_F(FailedReplan, WithoutAnyThreadTheNewestCheckpointIsNamedAndTheStateRemains) {
#ifdef LAYERSTREAM_TEST_ON_GPU
  GTEST_SKIP() << "the limit of address space would bind the driver as well";
#endif
  Trainer& trainer = start();
  trainer.save();
  trainer.step();
  {
    const ThreadLimit limit(0);
    EXPECT_THAT(message_of<Error>([&] { trainer.replan_if_asked(); }),
                AllOf(HasSubstr("re-plan after step 4 failed"), HasSubstr("and no way back"),
                      HasSubstr("; saving: "), HasSubstr("checkpoint-3 is the newest checkpoint")));
  }
  EXPECT_TRUE(fs::exists(output("replan.refused.yaml")));
  EXPECT_EQ(trainer.save().filename(), "checkpoint-4");
  trainer_.reset();
  EXPECT_TRUE(resumed() == straight());
}

TEST_F(FailedReplan, AStopMeanwhileLeavesACheckpoint) {
  Trainer& trainer = start();
  device_.stop(stop_);
  const TrainingEnd end = trainer.run();
  EXPECT_TRUE(end.interrupted);
  EXPECT_EQ(end.global_step, 3);
  EXPECT_THAT(lines_.str(), HasSubstr("given up: stopped by SIGTERM while pinning host memory"));
  trainer_.reset();
  EXPECT_TRUE(resumed() == straight());
}

}  // namespace
}  // namespace layerstream::test
