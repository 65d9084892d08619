#include "engine/executor.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <vector>

#include "backends/simulated_device.hpp"
#include "core/random.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/thread_limit.hpp"

namespace layerstream::test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// Runs operations by calling a function.
class FunctionRunner final : public OperationRunner {
 public:
  explicit FunctionRunner(std::function<void(const Operation&)> function) : function_(std::move(function)) {}
  void run(const Operation& operation, StreamView) override { function_(operation); }

 private:
  std::function<void(const Operation&)> function_;
};

/// `block` is the operation's own number, so that runners can tell operations apart.
Operation operation_on(Lane lane, int block, std::vector<int> dependencies = {}) {
  return {
      .kind = OperationKind::forward, .lane = lane, .block = block, .dependencies = std::move(dependencies)};
}

/// Threads meet here; whoever waits in vain for long says so.
class Rendezvous {
 public:
  explicit Rendezvous(int parties) : missing_(parties) {}
  bool meet() {
    std::unique_lock lock(mutex_);
    if (--missing_ == 0) changed_.notify_all();
    return changed_.wait_for(lock, 10s, [&] { return missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int missing_;
};

class ExecutorTest : public ::testing::Test {
 protected:
  /// Runs a schedule with an operation on each lane and counts them: the executor works.
  void expect_works() {
    Schedule schedule;
    for (const Lane lane : all_lanes) {
      const int index = static_cast<int>(schedule.operations.size());
      schedule.operations.push_back(
          operation_on(lane, index, index == 0 ? std::vector<int>{} : std::vector<int>{index - 1}));
    }
    std::vector<int> order;  // written by one lane after another
    FunctionRunner runner([&](const Operation& operation) { order.push_back(operation.block); });
    executor_.run(schedule, runner);
    EXPECT_THAT(order, ::testing::SizeIs(all_lanes.size()));
  }

  SimulatedDevice device_{std::size_t{1} << 20};
  Executor executor_{device_};
};

TEST_F(ExecutorTest, AllLanesRunAtTheSameTime) {
  Schedule schedule;
  for (const Lane lane : all_lanes) {
    schedule.operations.push_back(operation_on(lane, static_cast<int>(schedule.operations.size())));
  }
  Rendezvous rendezvous(static_cast<int>(all_lanes.size()));
  std::atomic<int> met{0};
  FunctionRunner runner([&](const Operation&) { met += rendezvous.meet() ? 1 : 0; });
  executor_.run(schedule, runner);
  EXPECT_EQ(met, static_cast<int>(all_lanes.size()));
}

/// Whatever comes first in the list: a lane that waits holds up no other.
TEST_F(ExecutorTest, EveryTwoLanesOverlapBehindAWaitingOne) {
  for (const Lane first : all_lanes) {
    for (const Lane second : all_lanes) {
      if (first == second) continue;
      Schedule schedule;
      schedule.operations.push_back(operation_on(first, 0));
      schedule.operations.push_back(operation_on(second, 1));
      schedule.operations.push_back(operation_on(first, 2, {1}));
      Rendezvous rendezvous(2);
      std::atomic<int> met{0};
      FunctionRunner runner([&](const Operation& operation) {
        if (operation.block < 2) met += rendezvous.meet() ? 1 : 0;
      });
      executor_.run(schedule, runner);
      EXPECT_EQ(met, 2) << name_of(first) << " and " << name_of(second);
    }
  }
}

TEST_F(ExecutorTest, ComputeRunsOnTheCallersThreadAndOtherLanesOnTheirOwn) {
  Schedule schedule;
  for (std::size_t i = 0; i < 3 * all_lanes.size(); ++i)
    schedule.operations.push_back(operation_on(all_lanes[i % all_lanes.size()], static_cast<int>(i)));
  std::mutex mutex;
  std::map<Lane, std::set<std::thread::id>> threads;
  FunctionRunner runner([&](const Operation& operation) {
    const std::lock_guard lock(mutex);
    threads[operation.lane].insert(std::this_thread::get_id());
  });
  executor_.run(schedule, runner);
  executor_.run(schedule, runner);
  std::set<std::thread::id> all;
  for (const auto& [lane, ids] : threads) {
    EXPECT_EQ(ids.size(), 1U) << name_of(lane);
    all.insert(ids.begin(), ids.end());
  }
  EXPECT_EQ(all.size(), all_lanes.size());
  EXPECT_TRUE(threads[Lane::compute].contains(std::this_thread::get_id()));
}

/// Sleeps now and then, by a rule that depends on seed, operation and side.
class RandomDelays final : public ExecutionObserver {
 public:
  explicit RandomDelays(std::uint64_t seed) : seed_(seed) {}
  void before(int index, const Operation&) override { sleep(0, index); }
  void after(int index, const Operation&) override { sleep(1, index); }

 private:
  void sleep(std::uint64_t side, int index) const {
    const double draw = uniform_at(seed_, side, static_cast<std::uint64_t>(index));
    if (draw < 0.2) std::this_thread::sleep_for(std::chrono::microseconds(static_cast<int>(draw * 1000)));
  }
  std::uint64_t seed_;
};

/// Lanes and dependencies drawn at random.
Schedule random_schedule(std::uint64_t seed, int size) {
  Schedule schedule;
  std::uint64_t index = 0;
  const auto below = [&](int limit) { return static_cast<int>(uniform_at(seed, 2, index++) * limit); };
  for (int i = 0; i < size; ++i) {
    const Lane lane = all_lanes[static_cast<std::size_t>(below(static_cast<int>(all_lanes.size())))];
    std::set<int> dependencies;
    for (int d = below(3); d > 0 && i > 0; --d) {
      const int other = std::max(0, i - 1 - below(20));
      if (schedule.operations[static_cast<std::size_t>(other)].lane != lane) dependencies.insert(other);
    }
    schedule.operations.push_back(operation_on(lane, i, {dependencies.begin(), dependencies.end()}));
  }
  return schedule;
}

TEST_F(ExecutorTest, DependenciesAndLaneOrderHoldUnderRandomDelays) {
  constexpr int size = 150;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Schedule schedule = random_schedule(seed, size);
    RandomDelays delays(seed);
    std::vector<std::atomic<bool>> done(size);
    std::vector<std::atomic<int>> last_of_lane(all_lanes.size());
    for (auto& last : last_of_lane) last = -1;
    std::atomic<int> violations{0};
    std::atomic<int> ran{0};
    FunctionRunner runner([&](const Operation& operation) {
      for (const int dependency : operation.dependencies) {
        if (!done[static_cast<std::size_t>(dependency)]) ++violations;
      }
      if (last_of_lane[static_cast<std::size_t>(operation.lane)].exchange(operation.block) >=
          operation.block) {
        ++violations;
      }
      std::this_thread::yield();
      done[static_cast<std::size_t>(operation.block)] = true;
      ++ran;
    });
    executor_.run(schedule, runner, &delays);
    EXPECT_EQ(ran, size) << "seed " << seed;
    EXPECT_EQ(violations, 0) << "seed " << seed;
  }
}

TEST_F(ExecutorTest, RunReturnsWhenEveryLaneIsDone) {
  for (const Lane lane : all_lanes) {
    Schedule schedule;
    schedule.operations.push_back(operation_on(lane, 0));
    std::atomic<bool> done{false};
    FunctionRunner runner([&](const Operation&) {
      std::this_thread::sleep_for(20ms);
      done = true;
    });
    executor_.run(schedule, runner);
    EXPECT_TRUE(done) << name_of(lane);
  }
}

TEST_F(ExecutorTest, EmptyScheduleIsDoneAtOnce) {
  FunctionRunner runner([](const Operation&) { ADD_FAILURE(); });
  executor_.run(Schedule{}, runner);
}

TEST_F(ExecutorTest, ObserverSeesEveryOperationAroundItsRun) {
  class Recorder final : public ExecutionObserver {
   public:
    void before(int index, const Operation& operation) override { note(index, operation, 'b'); }
    void after(int index, const Operation& operation) override { note(index, operation, 'a'); }
    void note(int index, const Operation& operation, char what) {
      const std::lock_guard lock(mutex);
      EXPECT_EQ(index, operation.block);
      events[index] += what;
    }
    std::mutex mutex;
    std::map<int, std::string> events;
  };
  const Schedule schedule = random_schedule(3, 40);
  Recorder recorder;
  FunctionRunner runner([&](const Operation& operation) { recorder.note(operation.block, operation, 'r'); });
  executor_.run(schedule, runner, &recorder);
  ASSERT_EQ(recorder.events.size(), 40U);
  for (const auto& [index, events] : recorder.events) EXPECT_EQ(events, "bra") << index;
}

/// Writes down what it is told of, with a name; operations of one lane only.
class Diary final : public ExecutionObserver {
 public:
  Diary(std::string name, std::vector<std::string>& lines) : name_(std::move(name)), lines_(lines) {}
  void begin(const Schedule&) override { note("begin"); }
  void before(int index, const Operation&) override { note(fmt::format("before {}", index)); }
  void after(int index, const Operation&) override { note(fmt::format("after {}", index)); }
  void failed(int index, const Operation&) noexcept override { note(fmt::format("failed {}", index)); }
  void end() noexcept override { note("end"); }

 private:
  void note(const std::string& what) { lines_.push_back(name_ + " " + what); }
  std::string name_;
  std::vector<std::string>& lines_;
};

TEST_F(ExecutorTest, ObserversOfAListEncloseOneAnother) {
  std::vector<std::string> lines;
  Diary outer("outer", lines), inner("inner", lines);
  ObserverList list;
  list.add(&outer);
  list.add(nullptr);
  list.add(&inner);
  Schedule schedule;
  schedule.operations.push_back(operation_on(Lane::compute, 0));
  FunctionRunner runner([&](const Operation&) { lines.emplace_back("run"); });
  executor_.run(schedule, runner, &list);
  EXPECT_THAT(lines,
              ::testing::ElementsAre("outer begin", "inner begin", "outer before 0", "inner before 0", "run",
                                     "inner after 0", "outer after 0", "inner end", "outer end"));
}

TEST_F(ExecutorTest, ObserversHearOfAFailureAndOfTheEnd) {
  for (const Lane lane : all_lanes) {
    std::vector<std::string> lines;
    Diary diary("", lines);
    Schedule schedule;
    for (int i = 0; i < 3; ++i) schedule.operations.push_back(operation_on(lane, i));
    FunctionRunner runner([&](const Operation& operation) {
      if (operation.block == 1) throw Error("here");
    });
    EXPECT_THROW(executor_.run(schedule, runner, &diary), Error);
    EXPECT_THAT(lines,
                ::testing::ElementsAre(" begin", " before 0", " after 0", " before 1", " failed 1", " end"));
  }
}

/// A schedule in which operation 2 of `lane` fails; all other lanes wait for it and then go on.
struct Failing {
  explicit Failing(Lane lane) {
    schedule.operations.push_back(operation_on(lane, 0));
    schedule.operations.push_back(operation_on(lane, 1, {}));
    schedule.operations.push_back(
        {.kind = OperationKind::backward, .lane = lane, .block = 2, .chunk = 7, .dependencies = {}});
    schedule.operations.push_back(operation_on(lane, 3));
    for (const Lane other : all_lanes) {
      if (other == lane) continue;
      const int index = static_cast<int>(schedule.operations.size());
      schedule.operations.push_back(operation_on(other, index, {2}));
      schedule.operations.push_back(operation_on(other, index + 1));
    }
  }
  Schedule schedule;
};

TEST_F(ExecutorTest, ErrorInAnyLaneStopsAllAndSaysWhereItHappened) {
  for (const Lane lane : all_lanes) {
    SCOPED_TRACE(name_of(lane));
    const Failing failing(lane);
    std::atomic<int> ran_after{0};
    FunctionRunner runner([&](const Operation& operation) {
      if (operation.block == 2) {
        std::this_thread::sleep_for(5ms);  // the others are waiting by now
        throw ResourceError("no memory left in the test");
      }
      if (operation.block > 2) ++ran_after;
    });
    try {
      executor_.run(failing.schedule, runner);
      ADD_FAILURE() << "no exception";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), exit_code::refused);
      EXPECT_THAT(error.what(), HasSubstr("backward"));
      EXPECT_THAT(error.what(), HasSubstr(fmt::format("lane {}", name_of(lane))));
      EXPECT_THAT(error.what(), HasSubstr("block 2"));
      EXPECT_THAT(error.what(), HasSubstr("chunk 7"));
      EXPECT_THAT(error.what(), HasSubstr("no memory left in the test"));
    }
    EXPECT_EQ(ran_after, 0);
    expect_works();
  }
}

TEST_F(ExecutorTest, ExitCodeOfTheErrorIsKept) {
  Schedule schedule;
  schedule.operations.push_back(operation_on(Lane::host, 0));
  const auto code_of = [&](const std::function<void()>& fail) {
    FunctionRunner runner([&](const Operation&) { fail(); });
    try {
      executor_.run(schedule, runner);
    } catch (const Error& error) {
      return error.code();
    }
    return -1;
  };
  EXPECT_EQ(code_of([] { throw Error("x", exit_code::not_finite); }), exit_code::not_finite);
  EXPECT_EQ(code_of([] { throw ConfigError("x"); }), exit_code::refused);
  EXPECT_EQ(code_of([] { throw ContractError("x"); }), exit_code::failure);
  EXPECT_EQ(code_of([] { throw std::bad_alloc(); }), exit_code::failure);
  EXPECT_EQ(code_of([] { throw 42; }), exit_code::failure);
  expect_works();
}

TEST_F(ExecutorTest, ErrorOfAnObserverStopsTheRunToo) {
  class Thrower final : public ExecutionObserver {
   public:
    void before(int index, const Operation&) override {
      if (index == 1) throw Error("the observer is unwell");
    }
    void after(int, const Operation&) override {}
  } thrower;
  const Failing failing(Lane::d2h);
  FunctionRunner runner([](const Operation& operation) { EXPECT_EQ(operation.block, 0); });
  EXPECT_THROW(executor_.run(failing.schedule, runner, &thrower), Error);
  expect_works();
}

TEST_F(ExecutorTest, OfTwoErrorsTheFirstIsRethrown) {
  // The host lane fails while the compute lane is in an operation that fails later.
  Schedule schedule;
  schedule.operations.push_back(operation_on(Lane::host, 0));
  schedule.operations.push_back(operation_on(Lane::compute, 1));
  Rendezvous both_run(2);
  FunctionRunner runner([&](const Operation& operation) {
    both_run.meet();
    if (operation.lane == Lane::host) throw Error("first");
    std::this_thread::sleep_for(50ms);
    throw Error("second");
  });
  try {
    executor_.run(schedule, runner);
    ADD_FAILURE() << "no exception";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("first"));
  }
  expect_works();
}

TEST_F(ExecutorTest, FailuresAtRandomPlacesNeverHangOrLeaveTraces) {
  constexpr int size = 60;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const Schedule schedule = random_schedule(seed, size);
    const int culprit = static_cast<int>(uniform_at(seed, 9, 0) * size);
    RandomDelays delays(seed);
    FunctionRunner runner([&](const Operation& operation) {
      if (operation.block == culprit) throw Error("planned");
    });
    try {
      executor_.run(schedule, runner, &delays);
      ADD_FAILURE() << "no exception, seed " << seed;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(fmt::format("block {}: planned", culprit)));
    }
    std::atomic<int> ran{0};
    FunctionRunner good([&](const Operation&) { ++ran; });
    executor_.run(schedule, good);
    EXPECT_EQ(ran, size) << "seed " << seed;
  }
}

TEST(Executor, CanBeDestroyedWithoutHavingRun) {
  SimulatedDevice device(1);
  const Executor executor(device);
}

TEST(Executor, WhereTheSystemRefusesALaneItsThreadNoneIsLeft) {
  SimulatedDevice device(1);
  const std::size_t num_threads = all_lanes.size() - 1;
  const ThreadLimit limit(num_threads - 1);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(message_of<ResourceError>([&] { const Executor executor(device); }),
                HasSubstr(fmt::format("{} of {} threads could be started", num_threads - 1, num_threads)));
  }
}

}  // namespace
}  // namespace layerstream::test
