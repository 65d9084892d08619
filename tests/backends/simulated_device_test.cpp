#include "backends/simulated_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "core/half.hpp"

namespace layerstream::test {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t mebibyte = std::size_t{1} << 20;

/// The message of the ResourceError that `function` must throw.
template <class Function>
std::string refusal_of(const Function& function) {
  try {
    function();
  } catch (const ResourceError& error) {
    EXPECT_EQ(error.code(), exit_code::refused);
    return error.what();
  }
  ADD_FAILURE() << "no ResourceError";
  return {};
}

TEST(SimulatedDevice, GivesExactlyItsLimit) {
  SimulatedDevice device(3 * mebibyte);
  EXPECT_EQ(device.memory_limit(), 3 * mebibyte);
  const auto first = device.allocate(mebibyte);
  const auto second = device.allocate(2 * mebibyte);
  EXPECT_EQ(first->bytes(), mebibyte);
  EXPECT_EQ(second->bytes(), 2 * mebibyte);
  for (const auto* region : {&first, &second}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>((*region)->data()) % 256, 0U);
    std::memset((*region)->data(), 1, (*region)->bytes());  // all of it is there
  }
  EXPECT_THROW(device.allocate(1), ResourceError);
}

TEST(SimulatedDevice, RefusalNamesNeedUseLimitAndRemedy) {
  SimulatedDevice device(3 * mebibyte);
  const auto held = device.allocate(2 * mebibyte);
  const std::string message = refusal_of([&] { device.allocate(mebibyte + mebibyte / 2); });
  EXPECT_THAT(message, HasSubstr("1.50 MiB"));
  EXPECT_THAT(message, HasSubstr("2.00 MiB in use"));
  EXPECT_THAT(message, HasSubstr("limit 3.00 MiB"));
  EXPECT_THAT(message, HasSubstr("device_memory_limit"));
}

TEST(SimulatedDevice, RefusedAllocationTakesNothing) {
  SimulatedDevice device(2 * mebibyte);
  const auto held = device.allocate(mebibyte);
  for (int i = 0; i < 3; ++i) EXPECT_THROW(device.allocate(2 * mebibyte), ResourceError);
  const auto rest = device.allocate(mebibyte);
  EXPECT_NE(rest->data(), nullptr);
}

TEST(SimulatedDevice, SizesThatWrapAroundAreRefusedByTheLimit) {
  SimulatedDevice device(2 * mebibyte);
  const auto held = device.allocate(mebibyte);
  const std::size_t wraps = std::numeric_limits<std::size_t>::max() - mebibyte / 2;
  EXPECT_THAT(refusal_of([&] { device.allocate(wraps); }), HasSubstr("device memory"));
  EXPECT_NO_THROW(device.allocate(mebibyte));
}

TEST(SimulatedDevice, FreedMemoryCanBeTakenAgain) {
  SimulatedDevice device(mebibyte);
  for (int i = 0; i < 5; ++i) {
    const auto region = device.allocate(mebibyte);
    EXPECT_THROW(device.allocate(1), ResourceError);
  }
}

TEST(SimulatedDevice, ThreadsTogetherGetNoMoreThanTheLimit) {
  SimulatedDevice device(10 * 4096);
  std::atomic<int> granted{0};
  std::vector<std::unique_ptr<DeviceRegion>> regions(40);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        try {
          regions[static_cast<std::size_t>(10 * t + i)] = device.allocate(4096);
          ++granted;
        } catch (const ResourceError&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(granted, 10);
}

TEST(SimulatedDevice, DescriptionSaysThatItIsSimulatedAndHowLargeItIs) {
  const std::string description = SimulatedDevice(2048 * mebibyte).description();
  EXPECT_THAT(description, HasSubstr("simulated device"));
  EXPECT_THAT(description, HasSubstr("2.00 GiB"));
}

TEST(SimulatedDevice, IsHostMemoryInDisguise) {
  SimulatedDevice device(mebibyte);
  EXPECT_TRUE(device.uses_host_memory());
  const auto region = device.allocate(256);
  const std::vector<char> values(256, 'x');
  device.link().copy(region->data(), values.data(), values.size(), device.stream(Lane::h2d));
  EXPECT_EQ(std::memcmp(region->data(), values.data(), values.size()), 0);
}

TEST(SimulatedDevice, PoisonReadsAsNaN) {
  SimulatedDevice device(mebibyte);
  const auto region = device.allocate(256);
  device.poison(region->data(), 128, device.stream(Lane::compute));
  for (int i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(static_cast<const float*>(region->data())[i]));
  for (int i = 0; i < 64; ++i) EXPECT_TRUE(std::isnan(to_float(static_cast<const bf16*>(region->data())[i])));
  EXPECT_EQ(static_cast<const float*>(region->data())[32], 0.0F);
}

/// Waits for an event on a thread of its own.
class Waiter {
 public:
  explicit Waiter(Event& event)
      : thread_([this, &event] {
          try {
            event.wait(StreamView::host());
            outcome_ = Outcome::passed;
          } catch (const Abandoned&) {
            outcome_ = Outcome::abandoned;
          }
        }) {}
  ~Waiter() {
    if (thread_.joinable()) thread_.join();
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  enum class Outcome { waiting, passed, abandoned };
  Outcome so_far() const { return outcome_; }
  Outcome at_the_end() {
    thread_.join();
    return outcome_;
  }

 private:
  std::atomic<Outcome> outcome_{Outcome::waiting};
  std::thread thread_;
};

/// Long enough for a thread that does not wait to be done.
void give_time() {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
}

TEST(SimulatedEvent, WaitBeforeRecordBlocksUntilItIsRecorded) {
  SimulatedDevice device(mebibyte);
  const auto event = device.make_event();
  event->reset();
  Waiter first(*event);
  Waiter second(*event);
  give_time();
  EXPECT_EQ(first.so_far(), Waiter::Outcome::waiting);
  EXPECT_EQ(second.so_far(), Waiter::Outcome::waiting);
  event->record(device.stream(Lane::h2d));
  EXPECT_EQ(first.at_the_end(), Waiter::Outcome::passed);
  EXPECT_EQ(second.at_the_end(), Waiter::Outcome::passed);
}

TEST(SimulatedEvent, WaitAfterRecordPassesAnyNumberOfTimes) {
  SimulatedDevice device(mebibyte);
  const auto event = device.make_event();
  event->reset();
  event->record(device.stream(Lane::h2d));
  for (int i = 0; i < 3; ++i) event->wait(device.stream(Lane::compute));
}

TEST(SimulatedEvent, WhatTheRecordingThreadWroteIsSeenAfterTheWait) {
  SimulatedDevice device(mebibyte);
  const auto event = device.make_event();
  for (int round = 0; round < 200; ++round) {
    event->reset();
    int value = 0;
    std::thread writer([&] {
      value = round + 1;
      event->record(device.stream(Lane::h2d));
    });
    event->wait(device.stream(Lane::compute));
    EXPECT_EQ(value, round + 1);
    writer.join();
  }
}

TEST(SimulatedEvent, AbandonWakesWaitersOfNowAndLater) {
  SimulatedDevice device(mebibyte);
  const auto event = device.make_event();
  event->reset();
  Waiter waiter(*event);
  give_time();
  EXPECT_EQ(waiter.so_far(), Waiter::Outcome::waiting);
  event->abandon();
  EXPECT_EQ(waiter.at_the_end(), Waiter::Outcome::abandoned);
  EXPECT_THROW(event->wait(device.stream(Lane::compute)), Abandoned);
}

TEST(SimulatedEvent, ResetMakesARecordedOrAbandonedEventWaitAgain) {
  SimulatedDevice device(mebibyte);
  const auto event = device.make_event();
  for (const bool abandon : {false, true}) {
    event->reset();
    if (abandon) {
      event->abandon();
    } else {
      event->record(device.stream(Lane::h2d));
    }
    event->reset();
    Waiter waiter(*event);
    give_time();
    EXPECT_EQ(waiter.so_far(), Waiter::Outcome::waiting);
    event->record(device.stream(Lane::h2d));
    EXPECT_EQ(waiter.at_the_end(), Waiter::Outcome::passed);
  }
}

}  // namespace
}  // namespace layerstream::test
