// A run of the program that is asked for another placement by a second process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/checkpoint_io.hpp"
#include "program_files.hpp"

namespace layerstream::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class ReplanCommand : public ::testing::Test {
 protected:
  ChildResult replan(const std::string& directory, const std::vector<std::string>& assignments) {
    std::vector<std::string> arguments{"replan", files_.path(directory).string()};
    for (const std::string& assignment : assignments) {
      arguments.push_back("--set");
      arguments.push_back(assignment);
    }
    return run_program(arguments);
  }
  ProgramFiles files_;
};

TEST_F(ReplanCommand, PlacesARunningModelAnewWithoutChangingABitOfTheRun) {
  // 6 M parameters: a step takes long enough for a request to come between two of them.
  auto model = small_model_json();
  model["hidden_size"] = 256;
  model["intermediate_size"] = 512;
  model["num_hidden_layers"] = 8;
  files_.write_model(model);
  RunConfig config = files_.config();
  config.lr_scheduler_type = SchedulerType::constant;  // whatever max_steps is
  config.weight_slots = 2;
  config.loop_order = LoopOrder::layer_major;
  config.activation_policy = ActivationPolicy::input;
  config.device_activation_blocks = 0;
  config.gradients_on_host = true;
  config.resident_blocks = 0;
  files_.write_config(config);

  Child child(files_.arguments("train", {"max_steps=1000000"}));
  ASSERT_TRUE(child.wait_for("step 2/"));
  const ChildResult asked = replan("out", {"resident_blocks=3", "weight_slots=1"});
  EXPECT_EQ(asked.exit_code, exit_code::success) << asked.err;
  EXPECT_THAT(asked.out, AllOf(HasSubstr("replan.yaml"), HasSubstr("takes it up after its present step")));
  ASSERT_TRUE(child.wait_for("placed anew"));
  ASSERT_TRUE(child.wait_for("resident weights and moments"));
  EXPECT_EQ(replan("out", {"resident_blocks=null", "activation_policy=all"}).exit_code, exit_code::success);
  ASSERT_TRUE(child.wait_for("saved intermediates"));
  EXPECT_EQ(replan("out", {"device_memory_limit=100kB"}).exit_code, exit_code::success);
  ASSERT_TRUE(child.wait_for("refused, the run goes on as it was: device memory: need"));
  child.signal(SIGTERM);
  const ChildResult result = child.finish();
  EXPECT_EQ(result.exit_code, exit_code::interrupted) << result.err;
  EXPECT_TRUE(fs::exists(files_.path("out/replan.applied.yaml")));
  EXPECT_TRUE(fs::exists(files_.path("out/replan.refused.yaml")));
  EXPECT_FALSE(fs::exists(files_.path("out/replan.yaml")));

  const auto last = io::newest_complete(files_.path("out"));
  ASSERT_TRUE(last);
  const ChildResult straight = files_.run(
      "train", {fmt::format("max_steps={}", last->step), "output_dir=" + files_.path("straight").string()});
  ASSERT_EQ(straight.exit_code, exit_code::success) << straight.err;
  EXPECT_EQ(metrics_lines(files_.path("out")), metrics_lines(files_.path("straight")));
  int compared = 0;
  for (const auto& entry : fs::directory_iterator(last->path)) {
    if (entry.path().extension() != ".safetensors") continue;
    const fs::path other = files_.path("straight") / last->path.filename() / entry.path().filename();
    EXPECT_TRUE(read_text(entry.path()) == read_text(other)) << other;
    ++compared;
  }
  EXPECT_EQ(compared, 10);
}

TEST_F(ReplanCommand, WhatNoRunCouldTakeUpIsRefusedAtOnce) {
  const auto refused = [&](const std::string& directory, const std::vector<std::string>& assignments) {
    const ChildResult result = replan(directory, assignments);
    EXPECT_EQ(result.exit_code, exit_code::refused);
    EXPECT_EQ(result.out, "");
    return result.err;
  };
  EXPECT_THAT(refused("out", {"weight_slots=3"}), AllOf(HasSubstr("out"), HasSubstr("no run is there")));
  EXPECT_FALSE(fs::exists(files_.path("out")));
  ASSERT_EQ(files_.run("train", {"max_steps=1"}).exit_code, exit_code::success);
  EXPECT_THAT(refused("out", {"learning_rate=1", "weight_slots=3"}),
              AllOf(HasSubstr("learning_rate (--set) cannot be re-planned"),
                    HasSubstr("may change the result"), HasSubstr("weight_slots")));
  EXPECT_THAT(refused("out", {"weight_slot=3"}), HasSubstr("did you mean `weight_slots`"));
  EXPECT_THAT(refused("out", {"weight_slots=many"}), HasSubstr("integer 1 to 1024"));
  EXPECT_THAT(refused("out", {"hardware_profile=abacus"}),
              HasSubstr("abacus is no file and no shipped profile"));
  refused("out", {});
  EXPECT_FALSE(fs::exists(files_.path("out/replan.yaml")));
}

TEST_F(ReplanCommand, AProfileIsFoundFromWhereverTheRunIs) {
  ASSERT_EQ(files_.run("train", {"max_steps=1"}).exit_code, exit_code::success);
  fs::copy_file(fs::path(LAYERSTREAM_PROFILES) / "h200-pcie5-128g.yaml", files_.path("my.yaml"));
  const std::string relative = fs::relative(files_.path("my.yaml")).string();
  EXPECT_EQ(replan("out", {"hardware_profile=" + relative}).exit_code, exit_code::success);
  EXPECT_THAT(read_text(files_.path("out/replan.yaml")), HasSubstr("hardware_profile: /"));
  const ChildResult result = replan("out", {"hardware_profile=h200-pcie5-128g"});
  EXPECT_THAT(result.out, HasSubstr("in place of one that still waited"));
  EXPECT_EQ(read_text(files_.path("out/replan.yaml")), "hardware_profile: h200-pcie5-128g\n");
}

}  // namespace
}  // namespace layerstream::test
