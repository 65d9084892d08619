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
  std::string value(std::string_view key) const {
    const auto field = std::ranges::find(schema_, key, &ConfigField::key);
    LAYERSTREAM_EXPECT(field != schema_.end(), "no configuration key {}", key);
    return field->show(run_);
  }

 private:
  const RunConfig& run_;
  const ConfigOrigins& origins_;
  std::vector<ConfigField> schema_;
};

/// Each adds to `problems` what contradicts itself among its keys.
void check_lr_scheduler(const RunConfig& run, const Namer& name, ConfigProblems& problems);
void check_data(const RunConfig& run, const Namer& name, ConfigProblems& problems);
void check_evaluation(const RunConfig& run, const Namer& name, ConfigProblems& problems);

}  // namespace layerstream
