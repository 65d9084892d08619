#include "engine/simulator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/random.hpp"
#include "engine/step_report.hpp"
#include "engine/trace.hpp"
#include "tests/support/message_of.hpp"

namespace layerstream::test {
namespace {

using Kind = OperationKind;
using Resource = MachineResource;
using Uses = std::vector<std::pair<Resource, double>>;

/// Sums and quotients of small round numbers: a few ulps.
constexpr double rounding = 1e-12;

/// Operations with their costs.
class Machine {
 public:
  int add(Lane lane, double seconds, const Uses& uses = {}, std::vector<int> dependencies = {},
          double weight = 1.0, double wake = 0.0) {
    schedule.operations.push_back({.kind = lane == Lane::compute ? Kind::forward : Kind::fetch_weights,
                                   .lane = lane,
                                   .dependencies = std::move(dependencies)});
    OperationCost cost{.seconds = seconds, .weight = weight, .wake_seconds = wake};
    for (const auto& [resource, use] : uses) cost.of(resource) = use;
    costs.push_back(cost);
    return static_cast<int>(costs.size()) - 1;
  }
  SimulatedRun run() const { return simulate(schedule, costs); }

  Schedule schedule;
  std::vector<OperationCost> costs;
};

void expect_time(const SimulatedRun& run, int operation, double begin, double end) {
  const OperationTime& time = run.times[static_cast<std::size_t>(operation)];
  EXPECT_NEAR(time.begin, begin, rounding) << "operation " << operation;
  EXPECT_NEAR(time.end, end, rounding) << "operation " << operation;
}

TEST(Simulator, NothingTakesNoTime) {
  const SimulatedRun run = simulate({}, {});
  EXPECT_EQ(run.seconds, 0.0);
  EXPECT_TRUE(run.times.empty());
}

TEST(Simulator, LanesOverlapAndEachIsSerialInItsOrder) {
  Machine machine;
  const int a = machine.add(Lane::compute, 2.0, {{Resource::compute, 1.0}});
  const int b = machine.add(Lane::h2d, 3.0, {{Resource::link_in, 1.0}});
  const int c = machine.add(Lane::compute, 2.0, {{Resource::compute, 1.0}});
  const SimulatedRun run = machine.run();
  expect_time(run, a, 0.0, 2.0);
  expect_time(run, b, 0.0, 3.0);
  expect_time(run, c, 2.0, 4.0);
  EXPECT_NEAR(run.seconds, 4.0, rounding);
  EXPECT_NEAR(run.use_of(Resource::compute), 1.0, rounding);
  EXPECT_NEAR(run.use_of(Resource::link_in), 0.75, rounding);
}

TEST(Simulator, TwoThatFillAResourceEachTakeTwiceAsLong) {
  Machine machine;
  const int a = machine.add(Lane::compute, 1.0, {{Resource::device_memory, 1.0}});
  const int b = machine.add(Lane::update, 1.0, {{Resource::device_memory, 1.0}});
  const SimulatedRun run = machine.run();
  expect_time(run, a, 0.0, 2.0);
  expect_time(run, b, 0.0, 2.0);
}

TEST(Simulator, WhenOneEndsTheOtherGoesOnAtFullSpeed) {
  Machine machine;
  const int a = machine.add(Lane::compute, 1.0, {{Resource::device_memory, 1.0}});
  const int b = machine.add(Lane::update, 3.0, {{Resource::device_memory, 1.0}});
  const SimulatedRun run = machine.run();
  expect_time(run, a, 0.0, 2.0);
  expect_time(run, b, 0.0, 4.0);
}

TEST(Simulator, WeightsDivideWhatIsContendedAndNobodyPassesItsOwnSpeed) {
  Machine machine;  // rates w·λ: 0.6 λ·1 + 0.6 λ·2 = 1 would give the second 1.11; it takes 1, the first 2/3
  const int a = machine.add(Lane::host, 2.0, {{Resource::host_memory, 0.6}});
  const int b = machine.add(Lane::h2d, 1.5, {{Resource::host_memory, 0.6}}, {}, 2.0);
  const SimulatedRun run = machine.run();
  expect_time(run, b, 0.0, 1.5);
  expect_time(run, a, 0.0, 2.5);  // 1 s of work in 1.5 s, then 1 s more
}

TEST(Simulator, ABottleneckDoesNotSlowThoseWhoDoNotUseIt) {
  Machine machine;
  const int a = machine.add(Lane::h2d, 1.0, {{Resource::link_duplex, 1.0}, {Resource::host_memory, 0.2}});
  const int b = machine.add(Lane::d2h, 1.0, {{Resource::link_duplex, 1.0}, {Resource::host_memory, 0.2}});
  const int c = machine.add(Lane::host, 2.0, {{Resource::host_memory, 0.8}});
  const SimulatedRun run = machine.run();
  expect_time(run, a, 0.0, 2.0);
  expect_time(run, b, 0.0, 2.0);
  expect_time(run, c, 0.0, 2.0);  // 0.5·0.2·2 + 0.8 = 1
}

TEST(Simulator, AHandComputedStepOfTwoBlocksThroughOneSlot) {
  Machine machine;
  const Uses in{{Resource::link_in, 1.0}};
  const Uses compute{{Resource::compute, 1.0}};
  const int fetch1 = machine.add(Lane::h2d, 2.0, in);
  const int forward1 = machine.add(Lane::compute, 3.0, compute, {fetch1});
  const int fetch2 = machine.add(Lane::h2d, 2.0, in, {forward1});
  const int forward2 = machine.add(Lane::compute, 3.0, compute, {fetch2});
  const int save2 = machine.add(Lane::d2h, 1.0, {{Resource::link_out, 1.0}}, {forward2});
  const SimulatedRun run = machine.run();
  expect_time(run, forward1, 2.0, 5.0);
  expect_time(run, fetch2, 5.0, 7.0);
  expect_time(run, forward2, 7.0, 10.0);
  expect_time(run, save2, 10.0, 11.0);
}

TEST(Simulator, AThreadThatWaitedWakesUpAndOneThatDidNotLosesNothing) {
  Machine machine;
  const int early = machine.add(Lane::compute, 1.0);
  const int a = machine.add(Lane::h2d, 3.0);
  const int no_wait = machine.add(Lane::h2d, 1.0, {}, {early}, 1.0, 0.25);
  const int late = machine.add(Lane::d2h, 1.0, {}, {no_wait}, 1.0, 0.25);
  const SimulatedRun run = machine.run();
  expect_time(run, a, 0.0, 3.0);
  expect_time(run, no_wait, 3.0, 4.0);
  expect_time(run, late, 4.25, 5.25);
}

TEST(Simulator, OperationsOfNoDurationKeepTheOrderOfDependencies) {
  Machine machine;
  const int a = machine.add(Lane::host, 0.0);
  const int b = machine.add(Lane::compute, 0.0, {}, {a});
  const int c = machine.add(Lane::h2d, 1.0, {}, {b});
  const int d = machine.add(Lane::compute, 0.0, {}, {c});
  const SimulatedRun run = machine.run();
  expect_time(run, c, 0.0, 1.0);
  expect_time(run, d, 1.0, 1.0);
}

TEST(Simulator, CostsThatNoMachineHasAreRefused) {
  for (const double seconds :
       {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Machine machine;
    machine.add(Lane::compute, seconds);
    EXPECT_THAT(message_of<ContractError>([&] { machine.run(); }), ::testing::HasSubstr("operation 0"));
  }
  Machine overused;
  overused.add(Lane::compute, 1.0, {{Resource::compute, 1.5}});
  EXPECT_THROW(overused.run(), ContractError);
  Machine circular;
  circular.add(Lane::compute, 1.0, {}, {1});
  circular.add(Lane::h2d, 1.0, {}, {0});
  EXPECT_THROW(circular.run(), ContractError);
  Machine short_of_costs;
  short_of_costs.add(Lane::compute, 1.0);
  short_of_costs.costs.clear();
  EXPECT_THROW(short_of_costs.run(), ContractError);
}

/// A schedule in which each operation waits for a few earlier ones, and uses a few resources.
Machine random_machine(std::uint64_t seed, int count) {
  Machine machine;
  std::uint64_t draw = 0;
  const auto below = [&](int limit) {
    return static_cast<int>(uniform_at(seed, 3, draw++) * static_cast<double>(limit));
  };
  for (int i = 0; i < count; ++i) {
    std::vector<int> dependencies;
    for (int d = 0; d < below(3) && i > 0; ++d) dependencies.push_back(below(i));
    Uses uses;
    for (const Resource resource : all_machine_resources) {
      if (below(3) == 0) uses.emplace_back(resource, 0.1 * (1 + below(10)));
    }
    machine.add(all_lanes[static_cast<std::size_t>(below(all_lanes.size()))], 0.1 * below(20), uses,
                dependencies, 0.5 + 0.5 * below(4), below(2) * 0.05);
  }
  return machine;
}

TEST(Simulator, RandomSchedulesKeepOrderAndConserveWork) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    const Machine machine = random_machine(seed, 120);
    const SimulatedRun run = machine.run();
    std::array<double, all_lanes.size()> lane_end{};
    std::array<double, all_machine_resources.size()> work{};
    for (std::size_t i = 0; i < machine.costs.size(); ++i) {
      const Operation& operation = machine.schedule.operations[i];
      const OperationTime& time = run.times[i];
      double& free = lane_end[static_cast<std::size_t>(operation.lane)];
      EXPECT_GE(time.begin, free);
      for (const int dependency : operation.dependencies) {
        EXPECT_GE(time.begin, run.times[static_cast<std::size_t>(dependency)].end);
      }
      EXPECT_GE(time.end - time.begin, machine.costs[i].seconds - 1e-9);
      free = time.end;
      for (std::size_t r = 0; r < work.size(); ++r)
        work[r] += machine.costs[i].seconds * machine.costs[i].use[r];
    }
    EXPECT_DOUBLE_EQ(run.seconds, *std::ranges::max_element(lane_end));
    for (std::size_t r = 0; r < work.size(); ++r) {
      EXPECT_LE(run.use[r], 1.0 + 1e-9);
      // A thousand sums of rounded rates.
      EXPECT_NEAR(run.use[r] * run.seconds, work[r], 1e-8);
    }
  }
}

TEST(Simulator, ReportAndTraceReadItsTimesAsTheyReadARuns) {
  const Machine machine = random_machine(4, 200);
  const SimulatedRun run = machine.run();
  const StepReport report = make_step_report(machine.schedule, run.times);
  EXPECT_DOUBLE_EQ(report.seconds, run.seconds);
  double whole = report.of(Lane::compute).busy;
  for (const WaitCause cause : all_wait_causes) whole += report.wait(cause);
  EXPECT_NEAR(whole, run.seconds, 1e-9);
  EXPECT_THAT(trace_json(machine.schedule, run.times), ::testing::HasSubstr("traceEvents"));
}

}  // namespace
}  // namespace layerstream::test
