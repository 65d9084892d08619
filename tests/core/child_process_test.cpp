#include "core/child_process.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <stdexcept>
#include <system_error>

namespace layerstream {
namespace {

using ::testing::ElementsAre;
using Clock = std::chrono::steady_clock;

struct Lines {
  std::vector<std::string> out, err;
  ChildCallbacks callbacks() {
    return {.line = [this](ChildProcess::Stream stream, std::string_view line) {
      (stream == ChildProcess::Stream::out ? out : err).emplace_back(line);
    }};
  }
};

ChildExit run_shell(const std::string& script, const ChildCallbacks& callbacks) {
  return run_child({"/bin/sh", "-c", script}, callbacks);
}

/// Whether a process of that id is there, be it a zombie.
bool exists(pid_t pid) {
  return ::kill(pid, 0) == 0;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

TEST(RunChild, GivesLinesOfBothStreamsAndTheExitCode) {
  Lines lines;
  const ChildExit end =
      run_shell("echo one; echo >&2; echo two >&2; printf 'no end'; exit 7", lines.callbacks());
  EXPECT_EQ(end.code, 7);
  EXPECT_EQ(end.signal, 0);
  EXPECT_GT(end.peak_bytes, 0U);
  EXPECT_THAT(lines.out, ElementsAre("one", "no end"));
  EXPECT_THAT(lines.err, ElementsAre("", "two"));
}

TEST(RunChild, PassesArgumentsAsTheyAreAndNoInput) {
  Lines lines;
  run_child({"sh", "-c", "printf '%s\\n' \"$@\"; cat", "sh", "a b", "$HOME", "", "'x'"},
            lines.callbacks());
  EXPECT_THAT(lines.out, ElementsAre("a b", "$HOME", "", "'x'"));
}

TEST(RunChild, TellsTheSignalThatKilledTheChild) {
  const ChildExit end = run_shell("kill -s KILL $$", {});
  EXPECT_EQ(end.code, -1);
  EXPECT_EQ(end.signal, SIGKILL);
}

TEST(RunChild, ReadsMoreThanAPipeHolds) {
  Lines lines;
  EXPECT_EQ(
      run_shell("i=0; while [ $i -lt 20000 ]; do echo $i; echo $i >&2; i=$((i + 1)); done", lines.callbacks())
          .code,
      0);
  EXPECT_EQ(lines.out.size(), 20000U);
  EXPECT_EQ(lines.out, lines.err);
}

TEST(RunChild, NamesAProgramThatIsNotThereOrNoProgram) {
  const auto error_of = [](const std::string& program) {
    try {
      run_child({program}, {});
    } catch (const std::system_error& error) {
      return error.code().value();
    }
    return 0;
  };
  EXPECT_EQ(error_of("/nowhere/python"), ENOENT);
  EXPECT_EQ(error_of("no-such-program-anywhere"), ENOENT);
  EXPECT_EQ(error_of("/tmp"), EACCES);
}

/// A script that says its process id, then does `then`.
std::string says_its_id(const std::string& then) {
  return "echo $$; " + then;
}

TEST(RunChild, AThrowingCallbackStopsTheChildWithSigtermFirst) {
  const std::string mark = ::testing::TempDir() + "child_process_test." + std::to_string(::getpid());
  pid_t child = 0;
  ChildCallbacks callbacks{.line = [&](auto, std::string_view line) { child = std::stoi(std::string(line)); },
                           .poll =
                               [&] {
                                 if (child != 0) throw std::runtime_error("enough");
                               }};
  const auto start = Clock::now();
  EXPECT_THROW(
      run_shell("trap 'echo ended > " + mark + "; exit' TERM; " + says_its_id("while :; do sleep 0.05; done"),
                callbacks),
      std::runtime_error);
  EXPECT_LT(seconds_since(start), 4.0);  // less than the grace
  EXPECT_FALSE(exists(child));
  std::string text;
  std::ifstream(mark) >> text;
  EXPECT_EQ(text, "ended");
  ::unlink(mark.c_str());
}

TEST(RunChild, AChildThatDoesNotHeedSigtermIsKilledWithItsOwnChildren) {
  std::vector<pid_t> processes;
  ChildCallbacks callbacks{
      .line = [&](auto, std::string_view line) { processes.push_back(std::stoi(std::string(line))); },
      .poll =
          [&] {
            if (processes.size() == 2) throw std::runtime_error("enough");
          },
      .grace = std::chrono::milliseconds(300)};
  const auto start = Clock::now();
  EXPECT_THROW(run_shell("trap '' TERM; sh -c 'echo $$; sleep 1000; sleep 1000' & " +
                             says_its_id("while :; do sleep 1; done"),
                         callbacks),
               std::runtime_error);
  EXPECT_GE(seconds_since(start), 0.3);
  ASSERT_EQ(processes.size(), 2U);
  // The other one is init's to wait for, if it does.
  for (const pid_t pid : processes) {
    std::string state;
    for (int i = 0; i < 100 && exists(pid); ++i) {
      std::ifstream status("/proc/" + std::to_string(pid) + "/stat");
      std::string id, name;
      status >> id >> name >> state;
      if (state == "Z") break;
      ::usleep(10'000);
    }
    EXPECT_TRUE(!exists(pid) || state == "Z") << pid << " " << state;
  }
}

TEST(RunChild, DoesNotWaitForWhatTheChildLeavesBehind) {
  Lines lines;
  const auto start = Clock::now();
  EXPECT_EQ(run_shell("sleep 20 & echo done", lines.callbacks()).code, 0);
  EXPECT_THAT(lines.out, ElementsAre("done"));
  EXPECT_LT(seconds_since(start), 10.0);
}

TEST(RunChild, PollsAChildThatIsSilentOrHasClosedItsStreams) {
  int polls = 0;
  run_shell("sleep 0.5; exec >&- 2>&-; sleep 0.5", {.poll = [&] { ++polls; }});
  EXPECT_GE(polls, 5);
}

TEST(ChildProcess, IsInAGroupOfItsOwnAndLeavesNoZombie) {
  pid_t group = 0;
  pid_t pid = 0;
  {
    ChildProcess child({"/bin/sh", "-c", "echo $$; sleep 1000"});
    std::string text;
    while (text.find('\n') == std::string::npos) {
      child.read_some(std::chrono::seconds(1), [&](auto, std::string_view bytes) { text += bytes; });
    }
    pid = std::stoi(text);
    group = ::getpgid(pid);
    EXPECT_FALSE(child.try_wait());
  }
  EXPECT_EQ(group, pid);
  EXPECT_NE(group, ::getpgrp());
  EXPECT_FALSE(exists(pid));
}

TEST(ShellLine, QuotesWhatAShellWouldTake) {
  EXPECT_EQ(shell_line({"python3", "--a=b/c", "", "x y", "it's", "$HOME", "*"}),
            "python3 --a=b/c '' 'x y' 'it'\\''s' '$HOME' '*'");
}

}  // namespace
}  // namespace layerstream
