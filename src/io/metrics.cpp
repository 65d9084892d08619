#include "io/metrics.hpp"

#include "core/error.hpp"
#include "io/json_text.hpp"

namespace layerstream::io {

namespace {

std::optional<std::int64_t> step_of(std::string_view line, const std::string& place) {
  const nlohmann::json json = parse_json(line, place);
  if (!json.is_object()) throw FileError(fmt::format("{}: is not a JSON object", place));
  const auto step = json.find("step");
  if (step == json.end() || !step->is_number_integer()) return {};
  return step->get<std::int64_t>();
}

nlohmann::ordered_json to_json(const MetricValue& value) {
  return std::visit([](const auto& v) { return nlohmann::ordered_json(v); }, value);
}

}  // namespace

MetricsWriter::MetricsWriter(std::filesystem::path path, std::int64_t resumed_step,
                             std::shared_ptr<FileSystem> files)
    : file_(path, kept_bytes(text_if_present(path), resumed_step, path, step_of), std::move(files)) {}

void MetricsWriter::write(std::int64_t step, std::initializer_list<Metric> metrics) {
  nlohmann::ordered_json json{{"step", step}};
  for (const auto& [name, value] : metrics) json[std::string(name)] = to_json(value);
  file_.append(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace layerstream::io
