#include "engine/step_monitor.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "engine/alarms.hpp"
#include "engine/trace.hpp"
#include "run_fixture.hpp"
#include "tests/backends/forwarding_device.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Remembers when the device was told to be recorded, as "on" and "off" among the steps that ran.
class RecordedDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void set_profiled(bool profiled) noexcept override { events.emplace_back(profiled ? "on" : "off"); }
  std::vector<std::string> events;
};

/// Adds the steps it sees to the device's events.
class StepRecorder final : public ExecutionObserver {
 public:
  explicit StepRecorder(std::vector<std::string>& events) : events_(events) {}
  void begin(const Schedule& schedule) override {
    if (schedule.step > 0) events_.push_back(fmt::format("step {}", schedule.step));
  }
  void before(int, const Operation&) override { ++operations; }
  void after(int, const Operation&) override {}
  std::atomic<int> operations{0};

 private:
  std::vector<std::string>& events_;
};

/// Throws in the first operation of a step.
class ThrowAtStep final : public ExecutionObserver {
 public:
  explicit ThrowAtStep(std::int64_t step) : step_(step) {}
  void begin(const Schedule& schedule) override { now_ = schedule.step; }
  void before(int index, const Operation&) override {
    if (now_ == step_ && index == 0) throw Error("here");
  }
  void after(int, const Operation&) override {}

 private:
  std::int64_t step_;
  std::int64_t now_ = 0;
};

class ProfileWindowTest : public ::testing::Test {
 protected:
  RunConfig config() const {
    RunConfig run = files_.config();
    run.max_steps = 5;
    run.profile_start_step = 2;
    run.profile_num_steps = 2;
    return run;
  }
  std::unique_ptr<Trainer> trainer(const RunConfig& run, ExecutionObserver* always = nullptr) {
    return std::make_unique<Trainer>(LoadedConfig{.run = run, .origins = {}}, device_, stop_, Log(lines_),
                                     EngineDiagnostics{.poison = false, .observer = always}, &recorder_);
  }

  RunFiles files_;
  std::ostringstream lines_;
  RecordedDevice device_{std::size_t{1} << 30};
  StepRecorder recorder_{device_.events};
  StopRequest stop_;
};

TEST_F(ProfileWindowTest, IsRecordedAndAnnotatedAndLeavesATraceForEachStep) {
  const RunConfig run = config();
  (void)trainer(run)->run();
  EXPECT_THAT(device_.events, ElementsAre("on", "step 2", "step 3", "off"));
  std::set<std::string> traces;
  for (const std::string& name : names_in(run.output_dir)) {
    if (name.starts_with("trace")) traces.insert(name);
  }
  EXPECT_THAT(traces, ElementsAre("trace-step2.json", "trace-step3.json"));
  EXPECT_THAT(lines_.str(), HasSubstr("trace of step 2: "));
}

TEST_F(ProfileWindowTest, IsClosedWhenAStepInItFails) {
  ThrowAtStep fails(3);
  const auto run = trainer(config(), &fails);
  EXPECT_THROW((void)run->run(), Error);
  EXPECT_THAT(device_.events, ElementsAre("on", "step 2", "step 3", "off"));
}

TEST_F(ProfileWindowTest, IsClosedBeforeTheCheckpointWhenASignalEndsTheRunInIt) {
  class StopAtStep final : public ExecutionObserver {
   public:
    explicit StopAtStep(StopRequest& stop) : stop_(stop) {}
    void begin(const Schedule& schedule) override {
      if (schedule.step == 2) stop_.request(SIGTERM);
    }
    void before(int, const Operation&) override {}
    void after(int, const Operation&) override {}

   private:
    StopRequest& stop_;
  } stops(stop_);
  EXPECT_TRUE(trainer(config(), &stops)->run().interrupted);
  EXPECT_THAT(device_.events, ElementsAre("on", "step 2", "off"));
}

TEST_F(ProfileWindowTest, ThatEndsAfterTheRunIsClosedWithIt) {
  RunConfig run = config();
  run.profile_start_step = 5;
  (void)trainer(run)->run();
  EXPECT_THAT(device_.events, ElementsAre("on", "step 5", "off"));
}

TEST_F(ProfileWindowTest, WithoutOneEveryStepIsAnnotatedAndNothingIsRecordedOrWritten) {
  RunConfig run = config();
  run.profile_num_steps = 0;
  (void)trainer(run)->run();
  EXPECT_THAT(device_.events, ElementsAre("step 1", "step 2", "step 3", "step 4", "step 5"));
  for (const std::string& name : names_in(run.output_dir)) EXPECT_FALSE(name.starts_with("trace")) << name;
}

TEST_F(ProfileWindowTest, ChangesNoBitOfTheResult) {
  RunConfig run = config();
  RunConfig plain = files_.config("plain");
  plain.max_steps = 5;
  const auto watched = trainer(run);
  (void)watched->run();
  const auto unwatched = trainer(plain);
  (void)unwatched->run();
  EXPECT_EQ(slab_bytes(watched->engine().parameters()), slab_bytes(unwatched->engine().parameters()));
}

TEST_F(ProfileWindowTest, ATraceThatCannotBeWrittenDoesNotEndTheRun) {
  const RunConfig run = config();
  std::filesystem::create_directories(std::filesystem::path(run.output_dir) / "trace-step2.json");
  EXPECT_FALSE(trainer(run)->run().interrupted);
  EXPECT_THAT(lines_.str(), AllOf(HasSubstr("trace-step2.json: the trace cannot be written"),
                                  HasSubstr("trace of step 3: ")));
}

// --- trace ---

TEST(Trace, HoldsEveryOperationOnItsLanesRowAndArrowsBetweenRows) {
  Schedule schedule;
  schedule.step = 7;
  schedule.operations = {
      {.kind = OperationKind::fetch_weights,
       .lane = Lane::h2d,
       .block = 3,
       .bytes = 1000,
       .dependencies = {}},
      {.kind = OperationKind::load_input, .lane = Lane::d2h, .block = 3, .dependencies = {}},
      {.kind = OperationKind::forward,
       .lane = Lane::compute,
       .block = 3,
       .chunk = 1,
       .flops = 2e9,
       .dependencies = {0, 1}},
  };
  const std::vector<OperationTime> times{{0.001, 0.003}, {0.0, 0.002}, {0.003, 0.004}};
  const auto json = nlohmann::json::parse(trace_json(schedule, times));
  std::map<int, std::string> rows;
  std::vector<nlohmann::json> slices, starts, finishes;
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("name") == "thread_name") rows[event.at("tid")] = event.at("args").at("name");
    if (event.at("ph") == "X") slices.push_back(event);
    if (event.at("ph") == "s") starts.push_back(event);
    if (event.at("ph") == "f") finishes.push_back(event);
  }
  ASSERT_EQ(slices.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(slices[i].at("name"), name_of(schedule.operations[i].kind));
    EXPECT_EQ(rows.at(slices[i].at("tid")), name_of(schedule.operations[i].lane));
    EXPECT_DOUBLE_EQ(slices[i].at("ts"), 1e6 * times[i].begin);
    EXPECT_NEAR(slices[i].at("dur"), 1e6 * (times[i].end - times[i].begin), 1e-3) << "written in ns";
  }
  EXPECT_EQ(slices[0].at("args"), nlohmann::json::parse(R"({"step":7,"block":3,"bytes":1000})"));
  EXPECT_EQ(slices[2].at("args"), nlohmann::json::parse(R"({"step":7,"block":3,"chunk":1,"flops":2e9})"));
  // From the dependency that ended last, inside its slice.
  ASSERT_EQ(starts.size(), 1U);
  ASSERT_EQ(finishes.size(), 1U);
  EXPECT_EQ(rows.at(starts[0].at("tid")), "h2d");
  EXPECT_LT(starts[0].at("ts").get<double>(), 3000.0);
  EXPECT_GE(starts[0].at("ts").get<double>(), 2999.0);
  EXPECT_EQ(rows.at(finishes[0].at("tid")), "compute");
  EXPECT_DOUBLE_EQ(finishes[0].at("ts"), 3000.0);
}

// --- alarms ---

/// A step of one second on a machine whose link does 50 GB/s and whose memory 200 GB/s, without a flaw.
struct Step {
  Step() {
    set(Lane::compute, 0.97, 0);
    report.seconds = 1.0;
    report.waits[static_cast<std::size_t>(WaitCause::issue)] = 0.03;
    report.to_device = {.busy = 0.8, .bytes = 36e9};
    report.to_host = {.busy = 0.4, .bytes = 18e9};
    set(Lane::host, 0.5, 80e9);
  }
  void set(Lane lane, double busy, double bytes) {
    report.lanes[static_cast<std::size_t>(lane)] = {.busy = busy, .bytes = bytes};
  }
  void wait(WaitCause cause, Lane lane, double seconds) {
    report.waits[static_cast<std::size_t>(cause)] += seconds;
    report.waits_for[static_cast<std::size_t>(lane)] += seconds;
    report.lanes[static_cast<std::size_t>(Lane::compute)].busy -= seconds;
  }
  std::vector<std::string> alarms() const { return alarms_of(report, measured); }

  StepReport report;
  MeasuredRates measured{.to_device = 50e9, .to_host = 50e9, .host_memory = 200e9};
};

TEST(Alarms, AreSilentWhenAllIsWell) {
  EXPECT_THAT(Step().alarms(), IsEmpty());
}

TEST(Alarms, ASlowLinkThatTheDeviceWaitsForIsNamedWithItsRate) {
  Step step;
  step.report.to_device = {.busy = 0.8, .bytes = 16e9};  // 20 GB/s
  EXPECT_THAT(step.alarms(), IsEmpty()) << "nobody waits for it";
  step.wait(WaitCause::weights, Lane::h2d, 0.12);
  EXPECT_THAT(step.alarms(),
              ElementsAre(AllOf(HasSubstr("link to the device at 20.0 GB/s, 40% of the 50.0 GB/s"),
                                HasSubstr("waited 12% of the step"))));
}

TEST(Alarms, AFastLinkMayBeWaitedFor) {
  Step step;
  step.wait(WaitCause::weights, Lane::h2d, 0.12);
  EXPECT_THAT(step.alarms(), IsEmpty());
}

TEST(Alarms, TheWayToTheHostIsWatchedToo) {
  Step step;
  step.report.to_host = {.busy = 0.4, .bytes = 8e9};
  step.wait(WaitCause::gradients, Lane::d2h, 0.1);
  EXPECT_THAT(step.alarms(), ElementsAre(HasSubstr("link to the host at 20.0 GB/s")));
}

TEST(Alarms, AnIdleDeviceIsNamedWithItsCausesLongestFirst) {
  Step step;
  step.wait(WaitCause::activations, Lane::h2d, 0.09);
  step.wait(WaitCause::weights, Lane::h2d, 0.15);
  EXPECT_THAT(
      step.alarms(),
      ElementsAre(HasSubstr("device busy 73%; it waited for: weights 15%, activations 9%, issue 3%")));
}

TEST(Alarms, ASaturatedHostIsNamed) {
  Step step;
  step.set(Lane::host, 0.5, 95e9);  // 190 GB/s
  EXPECT_THAT(step.alarms(), ElementsAre(AllOf(HasSubstr("host memory saturated"), HasSubstr("190.0 GB/s"),
                                               HasSubstr("optimizer_device_share"))));
}

TEST(Alarms, AHostThatTheDeviceWaitsForIsNamed) {
  Step step;
  step.wait(WaitCause::optimizer, Lane::host, 0.1);
  EXPECT_THAT(step.alarms(), ElementsAre(AllOf(HasSubstr("host update too slow"), HasSubstr("waited 10%"))));
}

TEST(Alarms, WhatWasNotMeasuredRaisesNone) {
  Step step;
  step.measured = {};
  step.report.to_device = {.busy = 0.8, .bytes = 1e9};
  step.wait(WaitCause::weights, Lane::h2d, 0.12);
  EXPECT_THAT(step.alarms(), IsEmpty());
}

}  // namespace
}  // namespace layerstream::test
