// The high-water mark of a whole process against its plan: load, training, save and resume.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/checkpoint_io.hpp"
#include "engine/memory_plan.hpp"
#include "engine/model_io.hpp"
#include "model/hf_config.hpp"
#include "program_files.hpp"

namespace layerstream::test {
namespace {

/// 16 M parameters: some 300 MB of state and gradients.
nlohmann::ordered_json model_json() {
  auto model = small_model_json(false);
  model["vocab_size"] = 4096;
  model["hidden_size"] = 512;
  model["intermediate_size"] = 1024;
  model["num_hidden_layers"] = 6;
  model["num_attention_heads"] = 8;
  model["head_dim"] = 64;
  model["torch_dtype"] = "bfloat16";
  return model;
}

class PeakMemory : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__)
    GTEST_SKIP() << "the sanitizer's own memory counts too";
#endif
#if defined(LAYERSTREAM_TEST_ON_GPU)
    GTEST_SKIP()
        << "the driver's and the CUDA libraries' own host memory, which grows while they load code, is "
           "more than this model's";
#endif
    files_.write_model(model_json());
    RunConfig config = files_.config();
    config.per_device_train_batch_size = 8;
    config.gradient_accumulation_steps = 1;
    config.compute_dtype = DType::bf16;
    files_.write_config(config);
  }

  /// "process peak in this build": what the plan says.
  std::size_t planned(const std::vector<std::string>& overrides = {}) {
    const ChildResult result = files_.run("plan", overrides);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::size_t total = 0;
    std::istringstream lines(result.out);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string space, component, number;
      words >> space >> component;
      while (words >> number) {
      }
      if (component == "total") total += std::stoull(number);
    }
    EXPECT_GT(total, std::size_t{200} << 20) << result.out;
    return total;
  }

  void expect_as_planned(const ChildResult& result, std::size_t plan) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_LE(result.peak_bytes, plan + transit_bytes)
        << format_bytes(result.peak_bytes) << " of " << format_bytes(plan);
    // And no more is asked for than is used: 5% of the plan.
    EXPECT_GE(result.peak_bytes, plan - plan / 20)
        << format_bytes(result.peak_bytes) << " of " << format_bytes(plan);
  }
  ProgramFiles files_;
};

TEST_F(PeakMemory, OfTrainingSavingResumingAndLoadingIsThePlan) {
  const std::size_t plan = planned();
  expect_as_planned(files_.run("train", {"max_steps=1"}), plan);
  expect_as_planned(files_.run("train", {"max_steps=2", "save_steps=1", "resume_from_checkpoint=auto"}),
                    plan);

  const ChildResult exported =
      run_program({"export", "--checkpoint", files_.path("out/checkpoint-2").string(), "--output",
                   files_.path("weights").string()});
  ASSERT_EQ(exported.exit_code, 0) << exported.err;
  const std::vector<std::string> loaded{
      "config_name=", "model_name_or_path=" + files_.path("weights").string(),
      "output_dir=" + files_.path("second").string(), "max_steps=1"};
  expect_as_planned(files_.run("train", loaded), planned(loaded));
}

TEST_F(PeakMemory, OfARunThatIsPlacedAnewIsThatOfItsLargestPlan) {
  const std::vector<std::string> saving{"activation_policy=all", "resident_blocks=0"};
  const std::vector<std::string> resident{"activation_policy=input", "resident_blocks=3",
                                          "gradient_home=device"};
  const std::size_t plan = std::max({planned(), planned(saving), planned(resident)});
  Child child(files_.arguments("train", {"max_steps=1000000"}));
  ASSERT_TRUE(child.wait_for("step 1/"));
  const auto replan = [&](const std::vector<std::string>& assignments, const std::string& sign) {
    std::vector<std::string> arguments{"replan", files_.path("out").string()};
    for (const std::string& assignment : assignments)
      arguments.insert(arguments.end(), {"--set", assignment});
    EXPECT_EQ(run_program(arguments).exit_code, 0);
    ASSERT_TRUE(child.wait_for(sign));
  };
  replan(saving, "saved intermediates");
  replan(resident, "resident weights and moments");
  child.signal(SIGTERM);
  const ChildResult result = child.finish();
  EXPECT_EQ(result.exit_code, exit_code::interrupted) << result.err;
  EXPECT_LE(result.peak_bytes, plan + transit_bytes)
      << format_bytes(result.peak_bytes) << " of " << format_bytes(plan);
}

struct Configuration {
  std::string name;
  std::vector<std::string> overrides;
};
void PrintTo(const Configuration& configuration, std::ostream* stream) {
  *stream << configuration.name;
}

class PlannedPeak : public PeakMemory, public ::testing::WithParamInterface<Configuration> {};

TEST_P(PlannedPeak, IsWithinFivePercentOfTheMeasuredOne) {
  std::vector<std::string> overrides = GetParam().overrides;
  overrides.push_back("max_steps=1");
  const auto plan = static_cast<double>(planned(overrides));
  const ChildResult result = files_.run("train", overrides);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NEAR(static_cast<double>(result.peak_bytes) / plan, 1.0, 0.05)
      << format_bytes(result.peak_bytes) << " of " << format_bytes(static_cast<std::size_t>(plan));
}

INSTANTIATE_TEST_SUITE_P(
    Configurations, PlannedPeak,
    ::testing::Values(
        Configuration{"bf16", {}},
        Configuration{"fp32_three_slots_coherent",
                      {"compute_dtype=fp32", "weight_slots=3", "backend=coherent", "allow_emulation=true"}},
        Configuration{"everything_saved_on_the_device",
                      {"activation_policy=all", "device_activation_blocks=100"}},
        Configuration{"updated_by_both_three_blocks_resident",
                      {"optimizer_device_share=0.5", "gradient_home=device", "resident_blocks=3"}},
        Configuration{
            "immediate_update_attention_on_the_host",
            {"optimizer_update=immediate", "max_grad_norm=0", "activation_policy=input+attention"}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace layerstream::test
