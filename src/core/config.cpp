#include "core/config.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "core/config_problems.hpp"
#include "core/config_schema.hpp"
#include "core/error.hpp"

namespace layerstream {
namespace {

/// Puts parsed entries into a RunConfig and collects everything that is wrong with them.
class Loader {
 public:
  Loader() : schema_(config_schema()) {}

  void apply_file(std::string_view yaml, std::string_view source_name) {
    const ConfigValue document = parse_yaml(yaml, source_name);
    if (document.kind == ConfigValue::Kind::null) return;
    if (document.kind != ConfigValue::Kind::map) {
      throw ConfigError(fmt::format("{}: expected lines of the form `key: value`", source_name));
    }
    std::map<std::string_view, int> first_line;
    const std::vector<ConfigEntry> entries = without_groups(document.entries);
    for (const ConfigEntry& entry : entries) {
      const std::string place = fmt::format("{}:{}", source_name, entry.line);
      const auto [earlier, is_new] = first_line.emplace(entry.key, entry.line);
      if (!is_new) {
        problems_.add("{}: `{}` is given twice, first in line {}; keep one of them", place, entry.key,
                      earlier->second);
        continue;
      }
      apply(entry, place, place, source_name);
    }
  }

  void apply_override(const std::string& assignment) {
    const std::size_t equals = assignment.find('=');
    const std::string place = fmt::format("--set '{}'", assignment);
    if (equals == std::string::npos || equals == 0) {
      problems_.add("{}: expected key=value", place);
      return;
    }
    ConfigEntry entry;
    entry.key = assignment.substr(0, equals);
    try {
      entry.value = parse_yaml(std::string_view(assignment).substr(equals + 1), place);
    } catch (const ConfigError& error) {
      problems_.add("{}; quote the value if it is a text with special characters", error.what());
      return;
    }
    for (const ConfigEntry& flat : without_groups({entry})) apply(flat, place, "--set", "");
  }

  LoadedConfig finish(std::string_view source_name) {
    problems_.throw_if_any(source_name);
    return std::move(config_);
  }

 private:
  const ConfigField* find(std::string_view key) const {
    const auto found = std::ranges::find(schema_, key, &ConfigField::key);
    return found == schema_.end() ? nullptr : &*found;
  }

  /// Whether `word` is the first part of keys with a dot.
  bool is_group(std::string_view word) const {
    return std::ranges::any_of(schema_, [prefix = std::string(word) + "."](const ConfigField& field) {
      return field.key.starts_with(prefix);
    });
  }

  /// `profile: {start_step: 1}` is `profile.start_step: 1`: entries whose key is the first part of keys with
  /// a dot become their inner entries.
  std::vector<ConfigEntry> without_groups(const std::vector<ConfigEntry>& entries) const {
    std::vector<ConfigEntry> flat;
    for (const ConfigEntry& entry : entries) {
      const bool is_nested = !entry.value.entries.empty() && is_group(entry.key);
      if (!is_nested) flat.push_back(entry);
      if (is_nested) {
        for (const ConfigEntry& inner : entry.value.entries)
          flat.push_back({entry.key + "." + inner.key, inner.value, inner.line});
      }
    }
    return flat;
  }

  void apply(const ConfigEntry& entry, const std::string& place, const std::string& origin,
             std::string_view source_name) {
    const ConfigField* field = find(entry.key);
    if (field == nullptr) {
      report_unknown(entry, entry.key, place, source_name);
      return;
    }
    RunConfig changed = config_.run;
    if (!field->assign(changed, entry.value) || !field->in_range(changed)) {
      problems_.add("{}: {} = {} is refused; allowed: {}", place, entry.key, shown(entry.value),
                    field->allowed);
      return;
    }
    config_.run = std::move(changed);
    config_.origins.insert_or_assign(entry.key, origin);
  }

  /// Reports each leaf under `entry`, whose path from the top is `path`. `source_name` is empty for
  /// overrides, which have no lines.
  void report_unknown(const ConfigEntry& entry, const std::string& path, const std::string& place,
                      std::string_view source_name) {
    if (entry.value.kind == ConfigValue::Kind::map && !entry.value.entries.empty()) {
      for (const ConfigEntry& inner : entry.value.entries) {
        const std::string inner_place =
            source_name.empty() ? place : fmt::format("{}:{}", source_name, inner.line);
        report_unknown(inner, path + "." + inner.key, inner_place, source_name);
      }
      return;
    }
    const std::size_t dot = path.rfind('.');
    const std::string_view leaf = dot == std::string::npos ? path : std::string_view(path).substr(dot + 1);
    if (dot != std::string::npos && find(leaf) != nullptr) {
      problems_.add("{}: `{}` is misplaced: keys are top level; write `{}` without `{}`", place, path, leaf,
                    std::string_view(path).substr(0, dot));
      return;
    }
    const bool in_group = dot != std::string::npos && is_group(std::string_view(path).substr(0, dot));
    const std::string_view meant = suggest_key(schema_, in_group ? std::string_view(path) : leaf);
    if (meant.empty()) {
      problems_.add("{}: unknown key `{}`; --print-config lists all keys", place, path);
    } else {
      problems_.add("{}: unknown key `{}`; did you mean `{}`{}?", place, path, meant,
                    dot == std::string::npos || in_group ? "" : ", at top level");
    }
  }

  static std::string shown(const ConfigValue& value) {
    switch (value.kind) {
      case ConfigValue::Kind::null:
        return "(nothing)";
      case ConfigValue::Kind::scalar:
        return value.text.empty() ? "''" : value.text;
      case ConfigValue::Kind::list: {
        std::string text;
        for (const ConfigValue& item : value.items) text += (text.empty() ? "" : ", ") + shown(item);
        return "[" + text + "]";
      }
      case ConfigValue::Kind::map: {
        std::string text;
        for (const ConfigEntry& entry : value.entries) text += (text.empty() ? "" : ", ") + entry.key;
        return "a map of " + text;
      }
    }
    return "";
  }

  std::vector<ConfigField> schema_;
  LoadedConfig config_;
  ConfigProblems problems_;
};

}  // namespace

std::string LoadedConfig::origin_of(std::string_view key) const {
  const auto found = origins.find(key);
  return found == origins.end() ? "default" : found->second;
}

LoadedConfig load_config(const std::filesystem::path& path, std::span<const std::string> overrides) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) {
    throw ConfigError(fmt::format("{}: cannot be read; give the path of a YAML file", path.string()));
  }
  const std::string yaml{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return parse_config(yaml, path.string(), overrides);
}

LoadedConfig parse_config(std::string_view yaml, std::string_view source_name,
                          std::span<const std::string> overrides) {
  Loader loader;
  loader.apply_file(yaml, source_name);
  for (const std::string& assignment : overrides) loader.apply_override(assignment);
  return loader.finish(source_name);
}

}  // namespace layerstream
