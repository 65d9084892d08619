#include "core/worker_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "core/error.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/thread_limit.hpp"

namespace layerstream {
namespace {

class WorkerPoolOfThreads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, WorkerPoolOfThreads, ::testing::Values(1, 2, 3, 8));

TEST_P(WorkerPoolOfThreads, CallsTheTaskOncePerIndex) {
  WorkerPool pool(GetParam());
  EXPECT_EQ(pool.num_threads(), GetParam());
  for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
    pool.parallel_for(count, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
    EXPECT_TRUE(std::all_of(calls.begin(), calls.end(), [](const std::atomic<int>& n) { return n == 1; }));
  }
}

TEST_P(WorkerPoolOfThreads, ResultsAreVisibleToTheCallerAtOnceOverManyRounds) {
  WorkerPool pool(GetParam());
  std::vector<std::int64_t> values(16, 0);
  for (std::int64_t round = 1; round <= 2000; ++round) {
    pool.parallel_for(16, [&](std::int64_t i) { ++values[static_cast<std::size_t>(i)]; });
    ASSERT_TRUE(
        std::all_of(values.begin(), values.end(), [&](std::int64_t value) { return value == round; }));
  }
}

TEST_P(WorkerPoolOfThreads, AnExceptionReachesTheCallerAfterAllOtherIndicesAndThePoolStaysUsable) {
  WorkerPool pool(GetParam());
  std::atomic<int> done = 0;
  const auto fail_at_5 = [&](std::int64_t i) {
    if (i == 5) throw std::runtime_error("index 5");
    ++done;
  };
  try {
    pool.parallel_for(20, fail_at_5);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "index 5");
  }
  EXPECT_EQ(done, 19);
  pool.parallel_for(4, [&](std::int64_t) { ++done; });
  EXPECT_EQ(done, 23);
}

TEST(WorkerPool, TheCallerIsOneOfTheThreads) {
  WorkerPool pool(1);
  std::thread::id id;
  pool.parallel_for(1, [&](std::int64_t) { id = std::this_thread::get_id(); });
  EXPECT_EQ(id, std::this_thread::get_id());
}

TEST(WorkerPool, AllThreadsRunAtTheSameTime) {
  // Each task waits for the other two: fewer threads would never finish, so the wait has an end.
  WorkerPool pool(3, {0});
  std::mutex mutex;
  std::condition_variable arrived;
  int waiting = 0;
  std::atomic<int> met = 0;
  pool.parallel_for(3, [&](std::int64_t) {
    std::unique_lock lock(mutex);
    ++waiting;
    arrived.notify_all();
    if (arrived.wait_for(lock, std::chrono::seconds(10), [&] { return waiting == 3; })) ++met;
  });
  EXPECT_EQ(met, 3);
}

TEST(WorkerPool, RefusesToHaveNoThread) {
  EXPECT_THROW(WorkerPool(0), ContractError);
}

TEST(WorkerPool, WhereTheSystemRefusesAThreadNoneIsLeft) {
  const test::ThreadLimit limit(3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(
        test::message_of<ResourceError>([] { WorkerPool(9); }),
        ::testing::AllOf(::testing::HasSubstr("3 of 8 threads could be started"),
                         ::testing::HasSubstr("lower optimizer_threads"), ::testing::HasSubstr("ulimit -u")));
  }
  WorkerPool pool(4);
  std::atomic<int> calls = 0;
  pool.parallel_for(20, [&](std::int64_t) { ++calls; });
  EXPECT_EQ(calls, 20);
}

}  // namespace
}  // namespace layerstream
