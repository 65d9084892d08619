#include "engine/run_record.hpp"

#include <fmt/chrono.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "core/config_schema.hpp"
#include "core/host_name.hpp"
#include "core/process_memory.hpp"
#include "ops/adamw.hpp"

namespace layerstream {
namespace {

using Json = nlohmann::ordered_json;

std::string utc_now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

Json model_json(const RunRecord& record) {
  const ModelSpec& spec = record.spec;
  return {{"config", record.model_path},
          {"parameters", record.engine.shape().layout.num_parameters()},
          {"layers", spec.num_hidden_layers},
          {"hidden_size", spec.hidden_size},
          {"attention_heads", spec.num_attention_heads},
          {"key_value_heads", spec.num_key_value_heads},
          {"vocab_size", spec.vocab_size},
          {"tied_embeddings", spec.tie_word_embeddings}};
}

Json ledger_json(const Ledger& ledger) {
  Json lines = Json::array();
  for (const LedgerLine& line : ledger.lines()) {
    lines.push_back({{"space", name_of(line.space)}, {"component", line.component}, {"bytes", line.bytes}});
  }
  return lines;
}

/// Every key in the schema's order, as it is in force.
Json configuration_json(const LoadedConfig& config, const RunConfig& placed) {
  const RunConfig defaults;
  Json keys = Json::array();
  for (const ConfigField& field : config_schema()) {
    const std::string value = field.show(placed);
    const auto origin = config.origins.find(field.key);
    std::string_view from = value == field.show(defaults) ? "default" : "chosen";
    if (origin != config.origins.end()) from = origin->second;
    keys.push_back({{"key", field.key}, {"value", value}, {"from", from}});
  }
  return keys;
}

Json planned_json(const std::optional<PlannedStep>& step) {
  if (!step) return nullptr;
  return {{"profile", step->profile},
          {"step_seconds", step->seconds},
          {"tokens_per_second", step->tokens_per_second}};
}

}  // namespace

std::string numbers_text(const EngineShape& shape) {
  return fmt::format("{} compute, fp32 master, moments and gradients", name_of(shape.compute));
}

std::string optimizer_text(const RunConfig& run) {
  return fmt::format("AdamW on {} with {} threads", ops::adamw_host_target(), optimizer_threads(run));
}

std::string RunRecord::to_json() const {
  const HostBudget host = host_budget(placed, engine.host_node().node);
  const Json json{
      {"layerstream", LAYERSTREAM_VERSION},
      {"written", utc_now()},
      {"host", host_name()},
      {"model", model_json(*this)},
      {"device", device.description()},
      {"backend", backend_decision(placed, device).to_text()},
      {"host_memory", engine.host_node().to_text()},
      {"numbers", numbers_text(engine.shape())},
      {"optimizer", optimizer_text(placed)},
      {"rates",
       {{"to_device", rates.to_device}, {"to_host", rates.to_host}, {"host_memory", rates.host_memory}}},
      {"steps",
       {{"total", total_steps},
        {"first", first_step},
        {"rows_per_step", rows_per_step},
        {"rows_per_epoch", num_rows},
        {"row_tokens", placed.cutoff_len},
        {"chunk_tokens", engine.shape().bounds.chunk_tokens}}},
      {"planned", planned_json(planned)},
      {"memory",
       {{"ledger", ledger_json(engine.ledger())},
        {"simulated_device", device.uses_host_memory()},
        {"device_limit", device.memory_limit()},
        {"device_used", device.used_bytes()},
        {"host_limit", host.bytes},
        {"host_limit_is", host.bound_by},
        {"process_peak", ProcessMemory::now().peak}}},
      {"configuration", configuration_json(config, placed)}};
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace layerstream
