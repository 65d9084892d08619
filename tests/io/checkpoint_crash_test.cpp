// A save that is killed or fails at any of its file-system calls leaves the newest complete checkpoint
// usable: the one before or the new one, and the next save works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint_files.hpp"
#include "core/error.hpp"
#include "data_files.hpp"
#include "faulty_file_system.hpp"
#include "io/checkpoint.hpp"

namespace layerstream::io {
namespace {

using testing::check_checkpoint;
using testing::DataDirectory;
using testing::fast_directory;
using testing::FaultyFileSystem;
using testing::names_in;
using testing::save_checkpoint;
using Fault = FaultyFileSystem::Fault;

/// What a run does at save_steps.
void save_and_prune(const std::string& out, std::int64_t step, int mark,
                    const std::shared_ptr<FileSystem>& files) {
  save_checkpoint(out, step, mark, files);
  prune(out, {.limit = 1}, step, files);
}

/// Path of the newest complete checkpoint; empty, which no check passes, if there is none.
std::filesystem::path newest_path(const std::string& out) {
  const std::optional<FoundCheckpoint> newest = newest_complete(out);
  return newest ? newest->path : std::filesystem::path();
}

struct Scenario {
  const char* name;
  std::int64_t step;   ///< of the save under test; step 10 is there already
  bool with_exchange;  ///< whether the file system has renameat2's RENAME_EXCHANGE
};

class InterruptedSave : public ::testing::TestWithParam<Scenario> {
 protected:
  static constexpr int old_mark = 1;
  static constexpr int new_mark = 2;

  std::shared_ptr<FaultyFileSystem> file_system(Fault fault, int at, int error_number = EIO) {
    auto files = std::make_shared<FaultyFileSystem>(fault, at, error_number);
    if (!GetParam().with_exchange) files->refuse_exchange();
    return files;
  }

  /// Calls that an undisturbed save makes.
  int count_calls() {
    const DataDirectory directory(fast_directory());
    save_checkpoint(directory.root(), 10, old_mark);
    const auto files = file_system(Fault::none, 0);
    save_and_prune(directory.root(), GetParam().step, new_mark, files);
    return files->calls();
  }

  /// The state after the disturbance, then after the next save. Returns the mark of the newest complete one.
  int check_and_continue(const std::string& out) {
    const std::optional<FoundCheckpoint> newest = newest_complete(out);
    EXPECT_TRUE(newest.has_value());
    if (!newest) return 0;
    const int mark = check_checkpoint(newest->path);
    EXPECT_TRUE(mark == old_mark || mark == new_mark) << mark;
    EXPECT_EQ(newest->step, mark == new_mark ? GetParam().step : 10);
    save_and_prune(out, 30, 3, std::make_shared<FileSystem>());
    EXPECT_EQ(names_in(out), "checkpoint-30") << "left behind";
    EXPECT_EQ(check_checkpoint(newest_path(out)), 3);
    return mark;
  }

  void kill_at_every_call(Fault fault) {
    const int calls = count_calls();
    EXPECT_GT(calls, 30);
    int old_ones = 0;
    int new_ones = 0;
    for (int n = 1; n <= calls; ++n) {
      const DataDirectory directory(fast_directory());
      save_checkpoint(directory.root(), 10, old_mark);
      const std::string out = directory.root();
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {  // file calls and malloc only: the other threads of the parent do not exist here
        try {
          save_and_prune(out, GetParam().step, new_mark, file_system(fault, n));
        } catch (...) {
        }
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
          << "call " << n << ": status " << status;
      (check_and_continue(out) == old_mark ? old_ones : new_ones)++;
      ASSERT_FALSE(HasFailure()) << "killed at call " << n;
    }
    EXPECT_GT(old_ones, 0);
    EXPECT_GT(new_ones, 0);
  }

  void fail_at_every_call(Fault fault, int error_number) {
    const int calls = count_calls();
    int failures = 0;
    for (int n = 1; n <= calls; ++n) {
      const DataDirectory directory(fast_directory());
      save_checkpoint(directory.root(), 10, old_mark);
      const auto files = file_system(fault, n, error_number);
      bool failed = false;
      try {
        save_and_prune(directory.root(), GetParam().step, new_mark, files);
      } catch (const FileError& error) {
        failed = true;
        EXPECT_EQ(std::string(error.what()).find(directory.root()), 0u) << error.what();
        EXPECT_NE(
            std::string(error.what()).find(fault == Fault::error ? "Input/output error" : "No space left"),
            std::string::npos)
            << error.what();
      }
      // Only a fault after the new one is durable, in removing the old one, may go without a word.
      const int mark = check_checkpoint(newest_path(directory.root()));
      EXPECT_TRUE(failed || mark == new_mark) << "a failed save that says nothing";
      if (failed && mark == old_mark && files->name_of_call() != "unlink" &&
          files->name_of_call() != "rmdir") {
        EXPECT_EQ(names_in(directory.root()), "checkpoint-10") << "the temporary directory is left";
      }
      failures += failed ? 1 : 0;
      check_and_continue(directory.root());
      ASSERT_FALSE(HasFailure()) << "failing at call " << n << ", " << files->name_of_call();
    }
    EXPECT_GT(failures, fault == Fault::error ? 25 : 10);
  }
};

TEST_P(InterruptedSave, KilledBeforeAnyCallLeavesACompleteCheckpoint) {
  kill_at_every_call(Fault::kill_before);
}
TEST_P(InterruptedSave, KilledWithinAnyCallLeavesACompleteCheckpoint) {
  kill_at_every_call(Fault::kill_within);
}
TEST_P(InterruptedSave, DiskFullAtAnyCallIsAnErrorAndLeavesACompleteCheckpoint) {
  fail_at_every_call(Fault::disk_full_from, ENOSPC);
}
TEST_P(InterruptedSave, IoErrorAtAnyCallIsAnErrorAndLeavesACompleteCheckpoint) {
  fail_at_every_call(Fault::error, EIO);
}

INSTANTIATE_TEST_SUITE_P(All, InterruptedSave,
                         ::testing::Values(Scenario{"NewStep", 20, true},
                                           Scenario{"SameStepByExchange", 10, true},
                                           Scenario{"SameStepByTwoRenames", 10, false}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(ReplacedCheckpoint, IsFoundAndPutBackWhenTheNewOneNeverCame) {
  const DataDirectory directory(fast_directory());
  save_checkpoint(directory.root(), 10, 1);
  std::filesystem::rename(directory.path("checkpoint-10"), directory.path("checkpoint-10.old"));
  EXPECT_EQ(newest_path(directory.root()), directory.path("checkpoint-10.old"));
  FileSystem files;
  remove_leftovers(directory.root(), files);
  EXPECT_EQ(names_in(directory.root()), "checkpoint-10");
  EXPECT_EQ(check_checkpoint(directory.path("checkpoint-10")), 1);
}

TEST(ReplacedCheckpoint, IsRemovedWhenTheNewOneIsInPlace) {
  const DataDirectory directory(fast_directory());
  save_checkpoint(directory.root(), 10, 1);
  std::filesystem::rename(directory.path("checkpoint-10"), directory.path("checkpoint-10.old"));
  save_checkpoint(directory.root() + "/elsewhere", 10, 2);
  std::filesystem::rename(directory.path("elsewhere/checkpoint-10"), directory.path("checkpoint-10"));
  EXPECT_EQ(check_checkpoint(newest_path(directory.root())), 2);
  save_checkpoint(directory.root(), 30, 3);
  EXPECT_EQ(names_in(directory.root()), "checkpoint-10 checkpoint-30 elsewhere");
  EXPECT_EQ(check_checkpoint(directory.path("checkpoint-10")), 2);
}

}  // namespace
}  // namespace layerstream::io
