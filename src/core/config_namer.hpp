#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "core/config.hpp"
#include "core/config_problems.hpp"
#include "core/config_schema.hpp"

/// Of check_config: what keys have to do with each other.
namespace layerstream {

/// Names keys as "key = value (place)".
class Namer {
 public:
  Namer(const RunConfig& run, const ConfigOrigins& origins)
      : run_(run), origins_(origins), schema_(config_schema()) {}

  const std::vector<ConfigField>& schema() const { return schema_; }

  std::string operator()(std::string_view key) const {
    const auto origin = origins_.find(key);
    return fmt::format("{} = {} ({})", key, value(key),
                       origin == origins_.end() ? "default" : origin->second);
  }

  /// As YAML.
  std::string value(std::string_view key) const { return field(key).show(run_); }
  bool is_default(std::string_view key) const { return value(key) == field(key).show(RunConfig{}); }

 private:
  const ConfigField& field(std::string_view key) const {
    const auto found = std::ranges::find(schema_, key, &ConfigField::key);
    LAYERSTREAM_EXPECT(found != schema_.end(), "no configuration key {}", key);
    return *found;
  }

  const RunConfig& run_;
  const ConfigOrigins& origins_;
  std::vector<ConfigField> schema_;
};

/// A key that means something only with some values of another.
struct OwnedKey {
  std::string_view name;
  std::vector<std::string_view> owners;
};

/// Adds to `problems` the keys that are given without one of their owners.
/// @param owner the key whose values those are
void check_owners(std::string_view owner, const std::vector<OwnedKey>& keys, const Namer& name,
                  ConfigProblems& problems);

/// Each adds to `problems` what contradicts itself among its keys.
void check_lr_scheduler(const RunConfig& run, const Namer& name, ConfigProblems& problems);
void check_data(const RunConfig& run, const Namer& name, ConfigProblems& problems);
void check_evaluation(const RunConfig& run, const Namer& name, ConfigProblems& problems);

}  // namespace layerstream
