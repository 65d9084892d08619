#include "engine/timeline.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.hpp"

namespace layerstream {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const Use& use) {
  return {{"busy", use.busy}, {"bytes", use.bytes}};
}

std::int64_t microseconds(double seconds) {
  return std::llround(1e6 * seconds);
}

Json lanes_json(const StepReport& report) {
  Json lanes = Json::array();
  for (const Lane lane : all_lanes) {
    Json json{{"name", name_of(lane)}};
    json.update(to_json(report.of(lane)));
    lanes.push_back(std::move(json));
  }
  return lanes;
}

Json waits_json(const StepReport& report) {
  Json waits = Json::object();
  for (const WaitCause cause : all_wait_causes) waits[std::string(name_of(cause))] = report.wait(cause);
  return waits;
}

}  // namespace

std::string timeline_json(const Schedule& schedule, std::span<const OperationTime> times,
                          const StepReport& report) {
  LAYERSTREAM_EXPECT(times.size() == schedule.operations.size(), "{} times for {} operations", times.size(),
                     schedule.operations.size());
  std::vector<std::string_view> kinds;
  std::vector<std::size_t> lane, kind;
  std::vector<int> block, chunk;
  std::vector<std::int64_t> begin, end;
  for (std::size_t i = 0; i < times.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    const auto known = std::ranges::find(kinds, name_of(operation.kind));
    kind.push_back(static_cast<std::size_t>(known - kinds.begin()));
    if (known == kinds.end()) kinds.push_back(name_of(operation.kind));
    lane.push_back(static_cast<std::size_t>(operation.lane));
    block.push_back(operation.block);
    chunk.push_back(operation.chunk);
    begin.push_back(microseconds(times[i].begin));
    end.push_back(microseconds(std::max(times[i].begin, times[i].end)));
  }
  const Json json{
      {"step", schedule.step},
      {"seconds", report.seconds},
      {"model_flops", report.model_flops},
      {"device_flops", report.device_flops},
      {"lanes", lanes_json(report)},
      {"link", {{"to_device", to_json(report.to_device)}, {"to_host", to_json(report.to_host)}}},
      {"waits", waits_json(report)},
      {"kinds", kinds},
      {"operations",
       {{"lane", lane}, {"kind", kind}, {"block", block}, {"chunk", chunk}, {"begin", begin}, {"end", end}}}};
  return json.dump() + "\n";
}

}  // namespace layerstream
