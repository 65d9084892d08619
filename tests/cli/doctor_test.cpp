// doctor: what it prints of this machine, what it writes, and its exit code.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "core/error.hpp"
#include "program_files.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Doctor, PrintsEveryCheckASummaryAndWritesAllOfItWithARecordingOfTheMachine) {
  const ProgramFiles files;
  const std::string output = files.path("doctor.txt").string();
  const ChildResult result = run_program({"doctor", "--bytes", "4MiB", "--output", output});
  EXPECT_EQ(result.exit_code, exit_code::success) << result.out << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("memory nodes: "), HasSubstr("host threads: "), HasSubstr("kernel settings: "),
                    HasSubstr("backend: ok"), HasSubstr("copies of registered memory: "),
                    HasSubstr("file cache: "), HasSubstr(" 0 FAIL"), HasSubstr("wrote " + output)));
  const std::string report = read_text(output);
  EXPECT_THAT(report,
              AllOf(HasSubstr("memory nodes: "), HasSubstr("device attributes"), HasSubstr(" s  backend")));
  // Not on kernels that are built without NUMA.
  if (std::filesystem::exists("/sys/devices/system/node/online")) {
    EXPECT_THAT(report, HasSubstr("==> sys/devices/system/node/online <=="));
  }
}

TEST(Doctor, ACheckThatCannotBeDoneFailsAndSoDoesTheProgram) {
  const ChildResult result = run_program({"doctor", "--bytes", "4MiB", "--scratch", "/nowhere/at/all"});
  EXPECT_EQ(result.exit_code, exit_code::failure);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("file cache: FAIL"), HasSubstr("/nowhere/at/all"), HasSubstr("1 FAIL")));
  EXPECT_THAT(result.err, HasSubstr("checks failed"));
}

TEST(Doctor, RefusesWhatMakesNoSense) {
  const ChildResult bytes = run_program({"doctor", "--bytes", "many"});
  EXPECT_EQ(bytes.exit_code, exit_code::refused);
  EXPECT_THAT(bytes.err, HasSubstr("--bytes many"));
  if (!std::filesystem::exists("/sys/devices/system/node/online")) return;  // a number is taken on trust
  const ChildResult node = run_program({"doctor", "--numa", "977"});
  EXPECT_EQ(node.exit_code, exit_code::refused);
  EXPECT_THAT(node.err, HasSubstr("numa: 977"));
}

}  // namespace
}  // namespace layerstream::test
