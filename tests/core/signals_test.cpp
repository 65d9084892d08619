#include "core/signals.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace layerstream {
namespace {

TEST(StopRequest, IsQuietUntilAsked) {
  StopRequest stop;
  EXPECT_FALSE(stop.requested());
  EXPECT_EQ(stop.signal_name(), "");
  EXPECT_NO_THROW(stop.throw_if_requested());
}

TEST(StopRequest, ThrowsWithTheExitCodeOfAnInterruptedRun) {
  StopRequest stop;
  stop.request();
  try {
    stop.throw_if_requested("loading weights");
    FAIL() << "did not throw";
  } catch (const Interrupted& error) {
    EXPECT_EQ(error.code(), 75);
    EXPECT_STREQ(error.what(), "stopped by SIGTERM while loading weights");
  }
}

TEST(StopRequest, KeepsTheFirstSignal) {
  StopRequest stop;
  stop.request(SIGUSR1);
  stop.request(SIGTERM);
  EXPECT_EQ(stop.signal_name(), "SIGUSR1");
}

TEST(SignalHandlers, TurnEachStopSignalIntoARequest) {
  for (const int signal_number : {SIGTERM, SIGINT, SIGUSR1}) {
    StopRequest stop;
    const SignalHandlers handlers(stop);
    ASSERT_EQ(raise(signal_number), 0);
    EXPECT_EQ(stop.signal_number(), signal_number);
  }
}

TEST(SignalHandlers, SurviveRepeatedTermination) {
  StopRequest stop;
  const SignalHandlers handlers(stop);
  raise(SIGTERM);
  raise(SIGTERM);
  raise(SIGUSR1);
  EXPECT_EQ(stop.signal_number(), SIGTERM);
}

TEST(SignalHandlers, PutTheFormerHandlersBack) {
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  struct sigaction before {};
  ASSERT_EQ(sigaction(SIGUSR1, &ignore, &before), 0);
  {
    StopRequest stop;
    const SignalHandlers handlers(stop);
  }
  struct sigaction after {};
  ASSERT_EQ(sigaction(SIGUSR1, &before, &after), 0);
  EXPECT_EQ(after.sa_handler, SIG_IGN);
}

TEST(SignalHandlers, ExistOnceAtATime) {
  StopRequest stop;
  {
    const SignalHandlers handlers(stop);
    EXPECT_THROW(SignalHandlers second(stop), ContractError);
  }
  EXPECT_NO_THROW(SignalHandlers third(stop));
}

TEST(SignalHandlersDeathTest, ASecondInterruptKillsAtOnce) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        StopRequest stop;
        const SignalHandlers handlers(stop);
        raise(SIGINT);
        if (!stop.requested()) _exit(1);
        raise(SIGINT);
        _exit(2);
      },
      ::testing::KilledBySignal(SIGINT), "");
}

}  // namespace
}  // namespace layerstream
