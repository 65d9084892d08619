#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace layerstream::report {

/// Lines of metrics.jsonl by field. What a line does not have is NaN.
struct Series {
  std::vector<std::int64_t> steps;  ///< ascending
  std::map<std::string, std::vector<double>, std::less<>> columns;

  /// Empty if no line has the field.
  const std::vector<double>& of(std::string_view name) const;
};

/// What a run has left in its output directory.
struct RunDirectory {
  std::filesystem::path path;
  Series training;          ///< lines of steps
  Series evaluation;        ///< lines with eval_ fields, and of them those
  nlohmann::json record;    ///< run.json; null if it is not there
  nlohmann::json timeline;  ///< timeline.json, likewise
};

/// A last line that is not finished is left out: the run may still be going on. Throws FileError where no
/// such directory is, or no metrics.jsonl with a step, or where a line before the last is malformed.
RunDirectory read_run(const std::filesystem::path& path);

}  // namespace layerstream::report
