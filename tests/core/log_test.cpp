#include "core/log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <sstream>
#include <thread>

#include "core/progress.hpp"

namespace layerstream {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

std::size_t count_lines(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(Log, LinesCarryTimeAndLevel) {
  std::ostringstream stream;
  const Log log(stream);
  log.info("{} of {}", 1, 2);
  log.warning("careful");
  EXPECT_THAT(stream.str(), ContainsRegex("[0-9]+-[0-9]+-[0-9]+ [0-9:.]+ info +1 of 2\n"));
  EXPECT_THAT(stream.str(), ContainsRegex("warning +careful\n"));
}

TEST(Log, HidesWhatIsBelowItsLevel) {
  std::ostringstream stream;
  const Log log(stream, LogLevel::warning);
  log.info("hidden");
  log.debug("hidden");
  log.error("shown");
  EXPECT_THAT(stream.str(), HasSubstr("shown"));
  EXPECT_THAT(stream.str(), Not(HasSubstr("hidden")));
}

TEST(Log, TextWithBracesIsNotAFormat) {
  std::ostringstream stream;
  Log(stream).write(LogLevel::info, "{} {0} {");
  EXPECT_THAT(stream.str(), HasSubstr("{} {0} {"));
}

TEST(Log, KnowsWhenItLastSpoke) {
  std::ostringstream stream;
  const Log log(stream, LogLevel::warning);
  const auto made = log.last_line();
  log.info("hidden");
  EXPECT_EQ(log.last_line(), made);
  std::this_thread::sleep_for(2ms);
  log.warning("shown");
  EXPECT_GT(log.last_line(), made);
}

TEST(FormatDuration, ReadsLikeAClock) {
  EXPECT_EQ(format_duration(0), "0.0s");
  EXPECT_EQ(format_duration(8.44), "8.4s");
  EXPECT_EQ(format_duration(59.96), "1m 00s");
  EXPECT_EQ(format_duration(200), "3m 20s");
  EXPECT_EQ(format_duration(3599.6), "1h 00m");
  EXPECT_EQ(format_duration(7500), "2h 05m");
  EXPECT_EQ(format_duration(4 * 86400 + 3 * 3600), "4d 03h");
  EXPECT_EQ(format_duration(-1), "?");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::quiet_NaN()), "?");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "?");
}

TEST(FormatCount, KeepsThreeDigits) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(512), "512");
  EXPECT_EQ(format_count(1234), "1.23k");
  EXPECT_EQ(format_count(12345), "12.3k");
  EXPECT_EQ(format_count(999.6), "1.00k");
  EXPECT_EQ(format_count(34.5e6), "34.5M");
  EXPECT_EQ(format_count(0.25), "0.25");
}

TEST(Progress, LineTellsStepLossNormRateAndEta) {
  Progress progress(10, 110);
  progress.step_done(2048, 2.0);
  EXPECT_EQ(progress.line({.loss = 2.34567, .grad_norm = 1.04, .learning_rate = 4.85e-5}),
            "step 11/110  loss 2.3457  norm 1.04  lr 4.85e-05  1.02k tok/s  ETA 3m 18s");
  EXPECT_THAT(progress.line({.mfu = 0.4123}), HasSubstr("MFU 41.2%"));
}

TEST(Progress, RateFollowsTheLastStepsOnly) {
  Progress progress(0, 100);
  progress.step_done(1000, 1000.0);
  EXPECT_DOUBLE_EQ(progress.tokens_per_second(), 1.0);
  for (int i = 0; i < 20; ++i) progress.step_done(1000, 1.0);
  EXPECT_DOUBLE_EQ(progress.tokens_per_second(), 1000.0);
  EXPECT_DOUBLE_EQ(progress.remaining_seconds(), 79.0);
}

TEST(Progress, KnowsNothingBeforeTheFirstStep) {
  const Progress progress(0, 10);
  EXPECT_EQ(progress.tokens_per_second(), 0);
  EXPECT_THAT(progress.line({}), HasSubstr("ETA ?"));
}

TEST(Heartbeat, SpeaksWhileThePhaseIsSilent) {
  std::ostringstream stream;
  const Log log(stream);
  {
    Heartbeat heartbeat(log, "loading weights", 20ms);
    heartbeat.set_done(25, 100);
    std::this_thread::sleep_for(150ms);
  }
  // At least one line in 7 intervals, and no more than one per interval.
  EXPECT_GE(count_lines(stream.str()), 1u);
  EXPECT_LE(count_lines(stream.str()), 8u);
  EXPECT_THAT(stream.str(), ContainsRegex("loading weights: .* so far, 25% done, .* to go"));
}

TEST(Heartbeat, IsSilentWhileOtherLinesCome) {
  std::ostringstream stream;
  const Log log(stream);
  {
    const Heartbeat heartbeat(log, "training", 2s);
    for (int i = 0; i < 5; ++i) {
      log.info("step");
      std::this_thread::sleep_for(10ms);
    }
  }
  EXPECT_THAT(stream.str(), Not(HasSubstr("training")));
}

TEST(Heartbeat, EndsAtOnceHoweverLongItsInterval) {
  const auto start = std::chrono::steady_clock::now();
  std::ostringstream stream;
  { const Heartbeat heartbeat(Log(stream), "saving", 1h); }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

TEST(Heartbeat, DoesNotSpinOnALogThatHidesIt) {
  std::ostringstream stream;
  const Log log(stream, LogLevel::error);
  const std::clock_t before = std::clock();
  {
    const Heartbeat heartbeat(log, "training", 10ms);
    std::this_thread::sleep_for(300ms);
  }
  // A spinning thread would burn the whole 0.3 s.
  EXPECT_LT(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC, 0.15);
  EXPECT_EQ(stream.str(), "");
}

}  // namespace
}  // namespace layerstream
