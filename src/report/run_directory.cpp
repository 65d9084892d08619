#include "report/run_directory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/error.hpp"
#include "io/append_file.hpp"
#include "io/file_source.hpp"
#include "io/json_text.hpp"

namespace layerstream::report {
namespace {

namespace fs = std::filesystem;

constexpr double absent = std::numeric_limits<double>::quiet_NaN();
constexpr std::string_view evaluation_prefix = "eval_";

/// NaN for null, by which metrics.jsonl writes NaN, and for what is no number.
double number_of(const nlohmann::json& value) {
  if (value.is_boolean()) return value.get<bool>() ? 1.0 : 0.0;
  return value.is_number() ? value.get<double>() : absent;
}

/// Adds to a series, column by column, lines of which each may have other fields.
class SeriesBuilder {
 public:
  /// `accepts(name)`: the fields that count. A line with none of them is none of this series.
  template <class Accepts>
  void add(std::int64_t step, const nlohmann::json& line, Accepts accepts) {
    bool any = false;
    for (const auto& [name, value] : line.items()) {
      if (name == "step" || !accepts(name) || !(value.is_primitive() && !value.is_string())) continue;
      std::vector<double>& column = series_.columns[name];
      column.resize(series_.steps.size(), absent);
      column.push_back(number_of(value));
      any = true;
    }
    if (any) series_.steps.push_back(step);
  }

  Series finish() {
    for (auto& [name, column] : series_.columns) column.resize(series_.steps.size(), absent);
    return std::move(series_);
  }

 private:
  Series series_;
};

/// Throws FileError naming `place`.
nlohmann::json parse_object(std::string_view text, const std::string& place) {
  nlohmann::json json = io::parse_json(text, place);
  if (!json.is_object()) throw FileError(fmt::format("{}: is not a JSON object", place));
  return json;
}

/// Lines of a whole file; of one that is being written all but the last, unfinished one.
void read_metrics(const fs::path& path, RunDirectory& run) {
  SeriesBuilder training, evaluation;
  const auto read = [&](std::string_view text, const std::string& place) {
    const nlohmann::json line = parse_object(text, place);
    const auto step = line.find("step");
    if (step == line.end() || !step->is_number_integer()) return true;
    const auto evaluates = [](std::string_view name) { return name.starts_with(evaluation_prefix); };
    if (line.contains("loss")) {
      training.add(step->get<std::int64_t>(), line, [&](std::string_view name) { return !evaluates(name); });
    }
    evaluation.add(step->get<std::int64_t>(), line, evaluates);
    return true;
  };
  io::read_appended_lines(io::read_text(path), path, read);
  run.training = training.finish();
  run.evaluation = evaluation.finish();
}

nlohmann::json read_if_present(const fs::path& path) {
  if (!fs::exists(path)) return nullptr;
  return parse_object(io::read_text(path), path.string());
}

}  // namespace

const std::vector<double>& Series::of(std::string_view name) const {
  static const std::vector<double> none;
  const auto found = columns.find(name);
  return found == columns.end() ? none : found->second;
}

RunDirectory read_run(const fs::path& path) {
  if (!fs::is_directory(path)) {
    throw FileError(fmt::format("{}: no such directory; give the output_dir of a run", path.string()));
  }
  const fs::path metrics = path / "metrics.jsonl";
  if (!fs::exists(metrics)) {
    throw FileError(fmt::format(
        "{}: has no metrics.jsonl, so no run has begun there; give the output_dir of a run", path.string()));
  }
  RunDirectory run;
  run.path = path;
  read_metrics(metrics, run);
  if (run.training.steps.empty()) {
    throw FileError(fmt::format("{}: has no finished line of a step yet", metrics.string()));
  }
  run.record = read_if_present(path / "run.json");
  run.timeline = read_if_present(path / "timeline.json");
  return run;
}

}  // namespace layerstream::report
