#include "report/comparison.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "report/figures.hpp"

namespace layerstream::report {
namespace {

/// The shortest ends of the paths that are all different.
std::vector<std::string> short_names(std::span<const RunDirectory> runs) {
  std::vector<std::vector<std::string>> parts;
  std::size_t longest = 0;
  for (const RunDirectory& run : runs) {
    std::vector<std::string>& names = parts.emplace_back();
    for (const auto& part : std::filesystem::absolute(run.path).lexically_normal()) {
      if (!part.empty() && part != "/") names.push_back(part.string());
    }
    longest = std::max(longest, names.size());
  }
  std::vector<std::string> names;
  for (std::size_t length = 1; length <= longest; ++length) {
    names.clear();
    for (const std::vector<std::string>& path : parts) {
      names.push_back(
          fmt::format("{}", fmt::join(path.end() - static_cast<std::ptrdiff_t>(std::min(length, path.size())),
                                      path.end(), "/")));
    }
    if (std::set(names.begin(), names.end()).size() == names.size()) break;
  }
  return names;
}

/// Rows in the order in which they are first mentioned.
class Rows {
 public:
  explicit Rows(std::size_t num_runs) : num_runs_(num_runs) {}

  void set(std::size_t run, const std::string& name, std::string value) {
    auto row = std::ranges::find(rows_, name, &Difference::name);
    if (row == rows_.end()) {
      rows_.push_back({name, std::vector<std::string>(num_runs_)});
      row = rows_.end() - 1;
    }
    row->values[run] = std::move(value);
  }

  std::vector<Difference> all() const { return rows_; }
  std::vector<Difference> differing() const {
    std::vector<Difference> result;
    std::ranges::copy_if(rows_, std::back_inserter(result), [](const Difference& row) {
      return std::ranges::any_of(row.values,
                                 [&](const std::string& value) { return value != row.values.front(); });
    });
    return result;
  }

 private:
  std::size_t num_runs_;
  std::vector<Difference> rows_;
};

std::string text_of(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void add_record(Rows& rows, std::size_t run, const nlohmann::json& record) {
  if (!record.is_object()) return;
  for (const auto& line : record.value("configuration", nlohmann::json::array())) {
    if (const std::string key = line.value("key", ""); key != "output_dir") {
      rows.set(run, key, line.value("value", ""));
    }
  }
  for (const char* name : {"device", "backend", "numbers", "optimizer", "host", "layerstream"}) {
    if (record.contains(name)) rows.set(run, name, text_of(record[name]));
  }
  const nlohmann::json model = record.value("model", nlohmann::json::object());
  for (const auto& [name, value] : model.items()) {
    if (name != "config") rows.set(run, "model: " + name, text_of(value));
  }
}

/// Columns under their names, as wide as they need.
std::string table(const std::vector<std::string>& names, const std::vector<Difference>& rows) {
  std::vector<std::size_t> widths{0};
  for (const std::string& name : names) widths.push_back(name.size());
  for (const Difference& row : rows) {
    widths[0] = std::max(widths[0], row.name.size());
    for (std::size_t i = 0; i < row.values.size(); ++i) {
      widths[i + 1] = std::max(widths[i + 1], row.values[i].size());
    }
  }
  std::string text;
  const auto line = [&](std::string_view first, const std::vector<std::string>& cells) {
    std::string written = fmt::format("{:<{}}", first, widths[0]);
    for (std::size_t i = 0; i < cells.size(); ++i)
      written += fmt::format("  {:<{}}", cells[i].empty() ? "-" : cells[i], widths[i + 1]);
    written.erase(written.find_last_not_of(' ') + 1);
    text += written + '\n';
  };
  line("", names);
  for (const Difference& row : rows) line(row.name, row.values);
  return text;
}

}  // namespace

Comparison compare(std::span<const RunDirectory> runs) {
  Rows figures(runs.size()), configuration(runs.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    for (const auto& [name, value] : figures_of(runs[i])) figures.set(i, name, value);
    add_record(configuration, i, runs[i].record);
  }
  return {.names = short_names(runs), .figures = figures.all(), .configuration = configuration.differing()};
}

std::string Comparison::to_text() const {
  std::string text = table(names, figures);
  text += configuration.empty() ? "\nconfiguration: nothing differs\n"
                                : "\nconfiguration: what differs\n" + table(names, configuration);
  return text;
}

}  // namespace layerstream::report
