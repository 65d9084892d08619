#include "engine/step_report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "engine_fixture.hpp"

namespace layerstream::test {
namespace {

using Kind = OperationKind;
using ::testing::HasSubstr;

/// Operations with their times, in tenths of a second so that the numbers are easy to read.
class Timeline {
 public:
  int add(Kind kind, Lane lane, int begin, int end, std::vector<int> dependencies = {},
          std::int64_t bytes = 0) {
    schedule.operations.push_back(
        {.kind = kind, .lane = lane, .bytes = bytes, .dependencies = std::move(dependencies)});
    times.push_back({.begin = 0.1 * begin, .end = 0.1 * end});
    return static_cast<int>(times.size()) - 1;
  }
  StepReport report() const { return make_step_report(schedule, times); }

  Schedule schedule;
  std::vector<OperationTime> times;
};

/// Waits in tenths of a second; causes that are not named are 0. Sums of products of 0.1: an ulp or two off.
void expect_waits(const StepReport& report, const std::map<WaitCause, double>& expected) {
  for (const WaitCause cause : all_wait_causes) {
    const auto found = expected.find(cause);
    EXPECT_NEAR(10.0 * report.wait(cause), found == expected.end() ? 0.0 : found->second, 1e-12)
        << name_of(cause);
  }
}

TEST(StepReport, AFetchThatComputeWaitsForIsAWaitForWeights) {
  Timeline line;
  const int fetch = line.add(Kind::fetch_weights, Lane::h2d, 0, 4, {}, 8'000'000'000);
  line.add(Kind::forward, Lane::compute, 4, 10, {fetch});
  const StepReport report = line.report();
  EXPECT_DOUBLE_EQ(report.seconds, 1.0);
  EXPECT_DOUBLE_EQ(report.busy_fraction(), 0.6);
  expect_waits(report, {{WaitCause::weights, 4}});
  EXPECT_DOUBLE_EQ(report.of(Lane::h2d).rate(), 20e9);
}

TEST(StepReport, AFetchThatWaitedForAnUpdateIsTheOptimizersForThatLong) {
  Timeline line;
  const int update = line.add(Kind::update, Lane::host, 0, 5);
  const int store = line.add(Kind::store_state, Lane::update_out, 0, 3);
  const int fetch = line.add(Kind::fetch_weights, Lane::h2d, 5, 7, {update, store});
  line.add(Kind::forward, Lane::compute, 7, 9, {fetch});
  expect_waits(line.report(), {{WaitCause::optimizer, 5}, {WaitCause::weights, 2}});
}

TEST(StepReport, AFetchBehindAnotherCopyOfItsLaneIsThatCopysFault) {
  Timeline line;
  line.add(Kind::load_input, Lane::h2d, 0, 3);
  const int fetch = line.add(Kind::fetch_weights, Lane::h2d, 3, 4);
  line.add(Kind::backward, Lane::compute, 4, 6, {fetch});
  expect_waits(line.report(), {{WaitCause::activations, 3}, {WaitCause::weights, 1}});
}

TEST(StepReport, AGradientSlotStillInUseIsAWaitForGradients) {
  Timeline line;
  line.add(Kind::backward, Lane::compute, 0, 2);
  const int emit = line.add(Kind::emit_gradient, Lane::d2h, 1, 5);
  line.add(Kind::clear_gradient, Lane::compute, 5, 6, {emit});
  expect_waits(line.report(), {{WaitCause::gradients, 3}});
}

TEST(StepReport, TimeThatNoDependencyExplainsIsIssue) {
  Timeline line;
  const int fetch = line.add(Kind::fetch_weights, Lane::h2d, 0, 1);
  line.add(Kind::forward, Lane::compute, 3, 5, {fetch});
  line.add(Kind::forward, Lane::compute, 6, 8);
  expect_waits(line.report(), {{WaitCause::weights, 1}, {WaitCause::issue, 3}});
}

TEST(StepReport, WaitsBeforeTheLastComputeOperationAreNotBlamedOnIt) {
  Timeline line;
  const int first = line.add(Kind::forward, Lane::compute, 0, 4);
  const int fetch = line.add(Kind::fetch_weights, Lane::h2d, 5, 8, {first});  // waited for the slot
  line.add(Kind::forward, Lane::compute, 8, 9, {fetch});
  expect_waits(line.report(), {{WaitCause::weights, 3}, {WaitCause::issue, 1}});
}

TEST(StepReport, WhatFollowsTheLastComputeOperationCounts) {
  Timeline line;
  const int backward = line.add(Kind::backward, Lane::compute, 0, 6);
  const int emit = line.add(Kind::emit_gradient, Lane::d2h, 6, 9, {backward});
  line.add(Kind::verdict, Lane::host, 9, 10, {emit});
  const StepReport report = line.report();
  EXPECT_DOUBLE_EQ(report.seconds, 1.0);
  expect_waits(report, {{WaitCause::gradients, 4}});
}

TEST(StepReport, LanesThatShareALinkAreBusyTogetherOnce) {
  Timeline line;
  line.add(Kind::save_input, Lane::d2h, 0, 4, {}, 4'000);
  line.add(Kind::store_state, Lane::update_out, 2, 6, {}, 6'000);
  line.add(Kind::store_state, Lane::update_out, 8, 10, {}, 2'000);
  line.add(Kind::load_state, Lane::h2d, 1, 2, {}, 500);
  const StepReport report = line.report();
  EXPECT_NEAR(report.to_host.busy, 0.8, 1e-15);
  EXPECT_DOUBLE_EQ(report.to_host.bytes, 12'000);
  EXPECT_NEAR(report.to_device.busy, 0.1, 1e-15);
}

TEST(StepReport, BusyTimeAndWaitsMakeTheWholeForAnyTimes) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Timeline line;
    std::uint64_t draw = 0;
    const auto below = [&](int limit) { return static_cast<int>(uniform_at(seed, 1, draw++) * limit); };
    std::array<double, all_lanes.size()> free{};
    for (int i = 0; i < 60; ++i) {
      const auto lane = static_cast<std::size_t>(below(static_cast<int>(all_lanes.size())));
      std::vector<int> dependencies;
      double ready = free[lane];
      for (int d = below(3); d > 0 && i > 0; --d) {
        const int other = below(i);
        if (line.schedule.operations[static_cast<std::size_t>(other)].lane == all_lanes[lane]) continue;
        dependencies.push_back(other);
        ready = std::max(ready, line.times[static_cast<std::size_t>(other)].end);
      }
      // Two clocks need not agree: now and then an operation seems to begin too early.
      const double begin = std::max(0.0, ready + 0.01 * below(5) - 0.003);
      const double end = begin + 0.1 * below(4);
      free[lane] = end;
      line.schedule.operations.push_back({.kind = static_cast<Kind>(below(static_cast<int>(Kind::verdict))),
                                          .lane = all_lanes[lane],
                                          .dependencies = std::move(dependencies)});
      line.times.push_back({.begin = begin, .end = end});
    }
    const StepReport report = line.report();
    const double waits = std::accumulate(report.waits.begin(), report.waits.end(), 0.0);
    EXPECT_NEAR(report.of(Lane::compute).busy + waits, report.seconds, 1e-12) << "seed " << seed;
  }
}

TEST(StepReport, MeanHasEveryPart) {
  Timeline one, two;
  one.add(Kind::forward, Lane::compute, 0, 2);
  two.add(Kind::forward, Lane::compute, 2, 8);
  const std::array reports{one.report(), two.report()};
  const StepReport mean = mean_of(reports);
  EXPECT_DOUBLE_EQ(mean.seconds, 0.5);
  EXPECT_DOUBLE_EQ(mean.of(Lane::compute).busy, 0.4);
  EXPECT_DOUBLE_EQ(mean.wait(WaitCause::issue), 0.1);
  EXPECT_THAT(mean.to_table(), HasSubstr("compute       80.0%"));
  EXPECT_THAT(mean.to_table(), HasSubstr("issue 20.0% (0.100 s)"));
}

// --- with an engine ---

struct TimedRun {
  explicit TimedRun(const RunConfig& run, const ModelSpec& spec = tiny_spec())
      : times(device), engine(spec, run, EngineMode::train, device, {.poison = false, .observer = &times}) {
    engine.parameters().initialize(1, 0.02, engine.pool());
  }
  void step(const std::vector<TokenRow>& rows) {
    (void)engine.train_step(rows, {.adamw = {.learning_rate = 1e-3, .step = ++steps}, .max_grad_norm = 1.0});
  }

  SimulatedDevice device{std::size_t{1} << 30};
  OperationTimes times;
  Engine engine;
  std::int64_t steps = 0;
};

TEST(OperationTimes, RespectDependenciesAndTheOrderOfLanes) {
  TimedRun run(tiny_run());
  run.times.set_enabled(true);
  const auto rows = random_rows(8, 24, 61, 3);
  run.step(rows);
  const auto start = std::chrono::steady_clock::now();
  run.step(rows);
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::vector<OperationTime> times = run.times.read();
  const Schedule& schedule = run.engine.schedule();
  ASSERT_EQ(times.size(), schedule.operations.size());
  std::array<double, all_lanes.size()> lane_end{};
  for (std::size_t i = 0; i < times.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    EXPECT_LE(times[i].begin, times[i].end);
    double& end = lane_end[static_cast<std::size_t>(operation.lane)];
    EXPECT_GE(times[i].begin, end) << i;
    end = times[i].end;
    for (const int dependency : operation.dependencies)
      EXPECT_GE(times[i].begin, times[static_cast<std::size_t>(dependency)].end) << i;
  }
  const StepReport report = make_step_report(schedule, times);
  EXPECT_GT(report.of(Lane::compute).busy, 0.0);
  EXPECT_GT(report.of(Lane::host).busy, 0.0);
  EXPECT_LE(report.seconds, wall);
}

TEST(OperationTimes, AreOffUntilAskedForAndAgainAfterwards) {
  TimedRun run(tiny_run());
  const auto rows = random_rows(2, 24, 61, 3);
  run.step(rows);
  EXPECT_THROW((void)run.times.read(), ContractError);
  run.times.set_enabled(true);
  EXPECT_THROW((void)run.times.read(), ContractError) << "that run was not timed";
  run.step(rows);
  EXPECT_EQ(run.times.read().size(), run.engine.schedule().operations.size());
  run.times.set_enabled(false);
  run.step(rows);
  EXPECT_THROW((void)run.times.read(), ContractError);
}

TEST(ModelFlops, AreSixPerWeightAndTokenAndThreeTimesAttention) {
  for (const bool tied : {false, true}) {
    ModelSpec spec = tiny_spec(tied);
    spec.vocab_size = 64;  // slabs pad matrices to a whole number of lines; these need none
    // Without documents and masks: rows of 24 tokens, each sees itself and those before it.
    std::vector<TokenRow> rows(3);
    for (TokenRow& row : rows) {
      row.document_starts = {0};
      row.input_ids.assign(24, 5);
      row.targets.assign(24, 7);
    }
    const double tokens = 3 * 24;
    const double pairs = 3 * 24 * 25 / 2;
    const std::int64_t h = spec.hidden_size, d = spec.head_dim;
    const std::int64_t layer = h * d * (2 * spec.num_attention_heads + 2 * spec.num_key_value_heads) +
                               3 * h * spec.intermediate_size;
    const double matrices =
        static_cast<double>(spec.num_hidden_layers * layer + spec.vocab_size * h);  // head; lookup is free
    // Two products of d multiply-adds per pair and head.
    const double attention =
        4.0 * static_cast<double>(spec.num_hidden_layers * spec.num_attention_heads * d) * pairs;
    for (const ActivationPolicy policy : {ActivationPolicy::input, ActivationPolicy::all}) {
      RunConfig config = tiny_run();
      config.activation_policy = policy;
      TimedRun run(config, spec);
      run.times.set_enabled(true);
      run.step(rows);
      const StepReport report = make_step_report(run.engine.schedule(), run.times.read());
      EXPECT_DOUBLE_EQ(report.model_flops, 6.0 * matrices * tokens + 3.0 * attention);
      EXPECT_DOUBLE_EQ(report.model_flops, model_flops(run.engine.schedule()));
      // Recomputation is the layers' forward pass once more but for the down projection; FlashAttention's
      // backward pass always computes the scores again, half of a forward pass.
      const std::int64_t again_per_layer = layer - h * spec.intermediate_size;
      const double again =
          policy == ActivationPolicy::input
              ? 2.0 * tokens * static_cast<double>(spec.num_hidden_layers * again_per_layer) + 1.5 * attention
              : 0.5 * attention;
      EXPECT_NEAR(report.device_flops, report.model_flops + again, 1e-9 * report.model_flops);
    }
    // Evaluation is one forward pass.
    RunConfig config = tiny_run();
    TimedRun run(config, spec);
    (void)run.engine.evaluate(rows);
    EXPECT_DOUBLE_EQ(model_flops(run.engine.schedule()), 2.0 * matrices * tokens + attention);
  }
}

}  // namespace
}  // namespace layerstream::test
