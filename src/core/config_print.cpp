#include <fmt/format.h>

#include <algorithm>

#include "core/config.hpp"
#include "core/config_schema.hpp"

namespace layerstream {
namespace {

/// One "key: value" line per key, under a heading per section; `comment(key)` may be empty.
template <class Comment>
std::string print(const RunConfig& run, Comment comment) {
  struct Line {
    const ConfigField& field;
    std::string text;
  };
  const std::vector<ConfigField> schema = config_schema();
  std::vector<Line> lines;
  std::size_t width = 0;
  for (const ConfigField& field : schema) {
    lines.push_back({field, fmt::format("{}: {}", field.key, field.show(run))});
    width = std::max(width, std::min<std::size_t>(lines.back().text.size(), 48));
  }
  std::string result;
  std::string_view section;
  for (const Line& line : lines) {
    if (line.field.section != section) {
      result += fmt::format("{}# {}\n", section.empty() ? "" : "\n", line.field.section);
      section = line.field.section;
    }
    const std::string note = comment(line.field.key);
    result += note.empty() ? line.text + "\n" : fmt::format("{:<{}}  # {}\n", line.text, width, note);
  }
  return result;
}

/// A '|' would end a table cell.
std::string cell(std::string_view text) {
  std::string result;
  for (const char c : text) result += c == '|' ? std::string("\\|") : std::string(1, c);
  return result;
}

}  // namespace

std::string config_yaml(const RunConfig& run) {
  return print(run, [](std::string_view) { return std::string(); });
}

std::string describe_config(const LoadedConfig& config) {
  return print(config.run, [&](std::string_view key) { return config.origin_of(key); });
}

std::string config_reference() {
  const RunConfig defaults;
  std::string result =
      "# Configuration\n\n"
      "Keys of a run's YAML file, and of `--set key=value`. All are top level; those with a dot may also "
      "stand as a group under their first word. This page is made from the "
      "schema in\n"
      "`src/core/config_schema.cpp`; a test keeps it so.\n\n";
  std::string_view section;
  for (const ConfigField& field : config_schema()) {
    if (field.section != section) {
      result += fmt::format("{}## {}\n\n| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n",
                            section.empty() ? "" : "\n", field.section);
      section = field.section;
    }
    result += fmt::format("| `{}` | `{}` | {} | {} |\n", field.key, field.show(defaults), cell(field.allowed),
                          cell(field.meaning));
  }
  return result;
}

}  // namespace layerstream
