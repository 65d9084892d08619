#include "engine/timeline.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.hpp"

namespace layerstream::test {
namespace {

TEST(Timeline, HoldsEveryOperationAndWhatTheReportSays) {
  Schedule schedule;
  schedule.step = 7;
  schedule.operations = {
      {.kind = OperationKind::fetch_weights,
       .lane = Lane::h2d,
       .block = 2,
       .bytes = 4'000,
       .dependencies = {}},
      {.kind = OperationKind::forward, .lane = Lane::compute, .block = 2, .chunk = 1, .dependencies = {0}},
      {.kind = OperationKind::fetch_weights, .lane = Lane::h2d, .block = 3, .dependencies = {}}};
  const std::vector<OperationTime> times{{0.0, 0.001}, {0.001, 0.004}, {0.001, 0.0025}};
  const StepReport report = make_step_report(schedule, times);
  const nlohmann::json json = nlohmann::json::parse(timeline_json(schedule, times, report));

  EXPECT_EQ(json["step"], 7);
  EXPECT_EQ(json["seconds"], report.seconds);
  EXPECT_EQ(json["kinds"], (std::vector<std::string>{"fetch_weights", "forward"}));
  const nlohmann::json& operations = json["operations"];
  EXPECT_EQ(operations["kind"], (std::vector<int>{0, 1, 0}));
  EXPECT_EQ(operations["block"], (std::vector<int>{2, 2, 3}));
  EXPECT_EQ(operations["chunk"], (std::vector<int>{-1, 1, -1}));
  EXPECT_EQ(operations["begin"], (std::vector<int>{0, 1000, 1000}));
  EXPECT_EQ(operations["end"], (std::vector<int>{1000, 4000, 2500}));
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    EXPECT_EQ(json["lanes"][operations["lane"][i].get<std::size_t>()]["name"],
              std::string(name_of(schedule.operations[i].lane)));
  }
  EXPECT_EQ(json["waits"]["weights"], report.wait(WaitCause::weights));
  EXPECT_EQ(json["link"]["to_device"]["bytes"], 4000.0);
  EXPECT_THROW((void)timeline_json(schedule, {}, report), ContractError);
}

}  // namespace
}  // namespace layerstream::test
