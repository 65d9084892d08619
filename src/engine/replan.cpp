#include "engine/replan.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "core/config_schema.hpp"
#include "core/error.hpp"
#include "io/file_sink.hpp"

namespace layerstream {
namespace {

namespace fs = std::filesystem;

/// Of a request while it is looked at: a later one may be waiting beside it.
constexpr std::string_view taken_name = "replan.taken.yaml";

/// Besides those of the section "Placement".
constexpr std::array other_keys{std::string_view("device_memory_limit"),
                                std::string_view("host_memory_limit"), std::string_view("optimizer_threads"),
                                std::string_view("pin_memory")};

bool can_be_replanned(const ConfigField& field) {
  return field.section == "Placement" || std::ranges::find(other_keys, field.key) != other_keys.end();
}

const ConfigField& field_of(const std::vector<ConfigField>& schema, std::string_view key) {
  const auto found = std::ranges::find(schema, key, &ConfigField::key);
  LAYERSTREAM_EXPECT(found != schema.end(), "no configuration key {}", key);
  return *found;
}

std::string request_text(const LoadedConfig& request) {
  std::string text;
  for (const ConfigField& field : config_schema()) {
    if (request.origins.contains(field.key))
      text += fmt::format("{}: {}\n", field.key, field.show(request.run));
  }
  return text;
}

}  // namespace

LoadedConfig parse_replan_request(std::string_view yaml, std::string_view source_name,
                                  std::span<const std::string> overrides) {
  LoadedConfig request = parse_config(yaml, source_name, overrides);
  std::string allowed;
  std::string refused;
  for (const ConfigField& field : config_schema()) {
    const bool allows = can_be_replanned(field);
    if (allows) allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", field.key);
    if (allows || !request.origins.contains(field.key)) continue;
    refused += fmt::format("{}{} ({})", refused.empty() ? "" : ", ", field.key, request.origin_of(field.key));
  }
  if (!refused.empty()) {
    throw ConfigError(fmt::format(
        "{} cannot be re-planned: it may change the result, or is settled when the process starts; stop the run and go "
        "on with resume_from_checkpoint: auto. Keys that can be: {}",
        refused, allowed));
  }
  if (request.origins.empty()) {
    throw ConfigError(fmt::format("{}: no key is given, so nothing is to be re-planned; keys that can be: {}",
                                  source_name, allowed));
  }
  return request;
}

LoadedConfig with_request(LoadedConfig running, const LoadedConfig& request) {
  const std::vector<ConfigField> schema = config_schema();
  for (const auto& [key, origin] : request.origins) {
    const ConfigField& field = field_of(schema, key);
    const bool assigned = field.assign(running.run, parse_yaml(field.show(request.run), key));
    LAYERSTREAM_EXPECT(assigned, "{} does not read back", key);
    running.origins.insert_or_assign(key, origin);
  }
  return running;
}

ReplanRequests::ReplanRequests(fs::path output_dir) : output_dir_(std::move(output_dir)) {}

bool ReplanRequests::submit(const LoadedConfig& request) {
  if (!fs::is_directory(output_dir_) || !fs::exists(path("metrics.jsonl"))) {
    throw ConfigError(fmt::format(
        "{}: no run is there, which would have a metrics.jsonl; give the output_dir of one that is training",
        output_dir_.string()));
  }
  const bool replaces = fs::exists(path(waiting_name));
  const fs::path written = path("replan.yaml.tmp");
  io::FileSink sink(std::make_shared<io::FileSystem>(), written);
  sink.append(request_text(request));
  sink.finish();
  io::rename(files_, written, path(waiting_name));
  io::sync_directory(files_, output_dir_);
  return replaces;
}

std::optional<std::string> ReplanRequests::take() {
  std::error_code ignored;
  if (!fs::exists(path(waiting_name), ignored)) return std::nullopt;
  io::rename(files_, path(waiting_name), path(taken_name));
  std::ifstream file(path(taken_name), std::ios::binary);
  return std::string{std::istreambuf_iterator<char>(file), {}};
}

void ReplanRequests::settle(Outcome outcome) {
  io::rename(files_, path(taken_name), path(outcome == Outcome::applied ? applied_name : refused_name));
}

}  // namespace layerstream
