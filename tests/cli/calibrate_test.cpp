// calibrate: what it writes is a profile that the planner takes; what it refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "profiles/hardware/hardware_profile.hpp"
#include "program_files.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Calibrate : public ::testing::Test {
 protected:
  ChildResult run(std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments{"calibrate",       "--model",        files_.path("model").string(),
                                       "--output",        output_.string(), "--seconds-per-rate",
                                       "0.005",           "--host-memory",  "32MiB",
                                       "--device-memory", "32MiB"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  }

  ProgramFiles files_;
  fs::path output_ = files_.path("box.yaml");
};

TEST_F(Calibrate, WritesAProfileOfThisMachineWithDateVersionsAndDeviceNames) {
  const ChildResult result = run();
  ASSERT_EQ(result.exit_code, exit_code::success) << result.err;
  const std::string text = read_text(output_);
  EXPECT_THAT(text, AllOf(StartsWith("# layerstream calibrate --model "), HasSubstr("# kernels: Kokkos"),
                          HasSubstr("# device: "), HasSubstr("# compiler: "),
                          HasSubstr("measured by layerstream calibrate, 20")));
  const HardwareProfile profile = load_hardware_profile(output_);
  EXPECT_EQ(profile.name, "box");
  EXPECT_FALSE(profile.device.name.empty());
  EXPECT_GE(profile.device.bf16_gemm_flops_per_second.points().size(), 1U);
  EXPECT_FALSE(fs::exists(output_.string() + ".part"));
}

TEST_F(Calibrate, DoesNotReplaceAFileUnlessForced) {
  write_text(output_, "mine");
  const ChildResult refused = run();
  EXPECT_EQ(refused.exit_code, exit_code::refused);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("box.yaml"), HasSubstr("--force")));
  EXPECT_EQ(read_text(output_), "mine");
  EXPECT_EQ(run({"--force"}).exit_code, exit_code::success);
  EXPECT_EQ(load_hardware_profile(output_).name, "box");
}

TEST_F(Calibrate, RefusesBeforeMeasuring) {
  output_ = files_.path("absent") / "box.yaml";
  EXPECT_THAT(run().err, HasSubstr("no such directory"));
  output_ = files_.path("box.yaml");
  EXPECT_THAT(run({"--host-memory", "many"}).err, HasSubstr("--host-memory"));
  const ChildResult no_model =
      run_program({"calibrate", "--model", files_.path("none").string(), "--output", output_.string()});
  EXPECT_EQ(no_model.exit_code, exit_code::refused);
  EXPECT_THAT(no_model.err, HasSubstr("none"));
  EXPECT_FALSE(fs::exists(output_));
}

}  // namespace
}  // namespace layerstream::test
