#include "engine/trainer_state.hpp"

#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.hpp"

namespace layerstream {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const std::optional<EvaluatedStep>& evaluated) {
  if (!evaluated) return nullptr;
  return {{"step", evaluated->step}, {"loss", evaluated->loss}};
}

std::optional<EvaluatedStep> evaluated_of(const Json& json) {
  if (json.is_null()) return {};
  // JSON has no NaN and no infinity: what was not finite is null.
  const Json& loss = json.at("loss");
  return EvaluatedStep{
      .step = json.at("step").get<std::int64_t>(),
      .loss = loss.is_null() ? std::numeric_limits<double>::quiet_NaN() : loss.get<double>()};
}

EvaluationState evaluation_of(const Json& json) {
  return {.last = evaluated_of(json.at("last")),
          .best = evaluated_of(json.at("best")),
          .best_checkpoint = evaluated_of(json.at("best_checkpoint")),
          .without_gain = json.at("without_gain").get<std::int64_t>(),
          .data_hash = json.at("data_hash").get<std::uint64_t>(),
          .num_rows = json.at("num_rows").get<std::int64_t>()};
}

}  // namespace

std::string to_json(const TrainerState& state) {
  const EvaluationState& evaluation = state.evaluation;
  const Json json{{"global_step", state.global_step},
                  {"applied_steps", state.applied_steps},
                  {"skipped_in_row", state.skipped_in_row},
                  {"tokens_seen", state.tokens_seen},
                  {"seed", state.seed},
                  {"rows_per_step", state.rows_per_step},
                  {"data_hash", state.data_hash},
                  {"evaluation",
                   {{"last", json_of(evaluation.last)},
                    {"best", json_of(evaluation.best)},
                    {"best_checkpoint", json_of(evaluation.best_checkpoint)},
                    {"without_gain", evaluation.without_gain},
                    {"data_hash", evaluation.data_hash},
                    {"num_rows", evaluation.num_rows}}},
                  {"recent_losses", state.recent_losses.values()},
                  {"recent_grad_norms", state.recent_grad_norms.values()}};
  return json.dump(2) + "\n";
}

TrainerState trainer_state_from_json(const std::string& text, const std::string& place) {
  try {
    const auto json = Json::parse(text);
    TrainerState state{.global_step = json.at("global_step").get<std::int64_t>(),
                       .applied_steps = json.at("applied_steps").get<std::int64_t>(),
                       .skipped_in_row = json.at("skipped_in_row").get<std::int64_t>(),
                       .tokens_seen = json.at("tokens_seen").get<std::int64_t>(),
                       .seed = json.at("seed").get<std::uint64_t>(),
                       .rows_per_step = json.at("rows_per_step").get<std::int64_t>(),
                       .data_hash = json.at("data_hash").get<std::uint64_t>()};
    if (json.contains("evaluation")) state.evaluation = evaluation_of(json.at("evaluation"));
    const auto recent = [&](const char* key) {
      return json.contains(key) ? RecentValues(json.at(key).get<std::vector<double>>()) : RecentValues();
    };
    state.recent_losses = recent("recent_losses");
    state.recent_grad_norms = recent("recent_grad_norms");
    return state;
  } catch (const nlohmann::json::exception& error) {
    throw FileError(fmt::format("{}: not a trainer state of this program: {}", place, error.what()));
  }
}

}  // namespace layerstream
