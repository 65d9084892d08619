// What a run leaves in its output directory for `layerstream report`.

#include "engine/run_record.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/step_prediction.hpp"
#include "profiles/hardware/shipped_profiles.hpp"
#include "run_fixture.hpp"

namespace layerstream::test {
namespace {

class RunRecordTest : public ::testing::Test {
 protected:
  nlohmann::json left(const std::string& name) const {
    return nlohmann::json::parse(io::read_text(std::filesystem::path(files_.config().output_dir) / name));
  }
  /// The entry of a key of the configuration.
  static nlohmann::json entry(const nlohmann::json& record, const std::string& key) {
    for (const nlohmann::json& line : record["configuration"]) {
      if (line["key"] == key) return line;
    }
    return nullptr;
  }

  RunFiles files_;
};

TEST_F(RunRecordTest, TellsTheRunItsMemoryAndWhereEachKeyCameFrom) {
  RunConfig config = files_.config();
  config.max_steps = 4;
  TestRun run(config);
  const nlohmann::json begun = left("run.json");
  EXPECT_EQ(begun["steps"]["total"], 4);
  EXPECT_EQ(begun["model"]["parameters"], run->engine().shape().layout.num_parameters());
  std::size_t bytes = 0;
  for (const nlohmann::json& line : begun["memory"]["ledger"]) bytes += line["bytes"].get<std::size_t>();
  EXPECT_EQ(bytes, run->engine().ledger().total(Space::host) + run->engine().ledger().total(Space::device));
  EXPECT_EQ(entry(begun, "seed")["from"], "default");
  EXPECT_EQ(entry(begun, "weight_slots")["from"], "chosen");
  EXPECT_EQ(entry(begun, "weight_slots")["value"],
            fmt::to_string(run->engine().shape().schedule.weight_slots));
}

TEST_F(RunRecordTest, TheThirdStepOfEachProcessLeavesItsTimelineOrTheLastOfAShorterOne) {
  RunConfig config = files_.config();
  config.max_steps = 4;
  train_to_the_end(config);
  EXPECT_EQ(left("timeline.json")["step"], 3);
  config.resume_from_checkpoint = "auto";
  config.max_steps = 6;
  train_to_the_end(config);
  const nlohmann::json timeline = left("timeline.json");
  EXPECT_EQ(timeline["step"], 6);
  EXPECT_GT(timeline["operations"]["kind"].size(), 10U);
  EXPECT_EQ(left("run.json")["steps"]["first"], 4);
}

TEST_F(RunRecordTest, AnotherPlacementIsRecordedAnew) {
  RunConfig config = files_.config();
  config.max_steps = 9;
  TestRun run(config);
  for (int step = 0; step < 4; ++step) (void)run->step();
  EXPECT_EQ(left("timeline.json")["step"], 3);
  ReplanRequests(config.output_dir).submit(parse_replan_request("weight_slots: 3", "request"));
  run->replan_if_asked();
  EXPECT_EQ(entry(left("run.json"), "weight_slots")["value"], "3");
  for (int step = 0; step < 3; ++step) (void)run->step();
  EXPECT_EQ(left("timeline.json")["step"], 7);
}

TEST_F(RunRecordTest, ThePlannedStepIsThatOfTheEnginesShape) {
  const HardwareProfile profile = find_hardware_profile("h200-pcie5-128g");
  RunConfig config = files_.config();
  config.hardware_profile = "h200-pcie5-128g";
  TestRun run(config);
  const auto predicted = [&]() -> nlohmann::json {
    const EngineShape& shape = run->engine().shape();
    const ChunkPlan chunks = uniform_chunk_plan(4, config.cutoff_len, shape.bounds.chunk_tokens);
    const StepPrediction step =
        predict_step(profile, shape, chunks, planned_block_costs(shape, run->engine().backend()));
    return {{"profile", profile.name},
            {"step_seconds", step.run.seconds},
            {"tokens_per_second", step.tokens_per_second(chunks)}};
  };
  const nlohmann::json first = left("run.json")["planned"];
  EXPECT_EQ(first, predicted());
  (void)run->step();
  ReplanRequests(config.output_dir).submit(parse_replan_request("resident_blocks: 0", "request"));
  run->replan_if_asked();
  const nlohmann::json second = left("run.json")["planned"];
  EXPECT_EQ(second, predicted());
  EXPECT_GT(second["step_seconds"], first["step_seconds"]);
}

TEST_F(RunRecordTest, WithoutRatesNoStepIsPlanned) {
  TestRun run(files_.config());
  EXPECT_TRUE(left("run.json")["planned"].is_null());
}

}  // namespace
}  // namespace layerstream::test
