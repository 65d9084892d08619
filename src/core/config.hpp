#pragma once

#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "core/run_config.hpp"

namespace layerstream {

/// Where a key's value came from: "run.yaml:12" or "--set". A key that is not listed has its default.
using ConfigOrigins = std::map<std::string, std::string, std::less<>>;

/// A configuration, and the place of each value that is not a default.
struct LoadedConfig {
  RunConfig run;
  ConfigOrigins origins;

  /// "default", "run.yaml:12" or "--set".
  std::string origin_of(std::string_view key) const;
};

/// Reads the YAML file `path`, then applies `overrides` ("key=value", the value being YAML) in order; the
/// last one of a key wins. Throws ConfigError naming every key that is unknown, misplaced, given twice, of
/// the wrong type or out of range, with its place and what is allowed. Relations between keys are left
/// to `check_config`, so that a configuration that breaks one can still be printed.
LoadedConfig load_config(const std::filesystem::path& path, std::span<const std::string> overrides = {});

/// The same from text; `source_name` stands for the file name in messages and origins.
LoadedConfig parse_config(std::string_view yaml, std::string_view source_name,
                          std::span<const std::string> overrides = {});

/// The range of every key, and all relations between keys. Throws ConfigError naming every broken one;
/// `origins` adds where the values came from.
void check_config(const RunConfig& run, const ConfigOrigins& origins = {});
void check_config(const LoadedConfig& config);

/// Throws ConfigError naming those of `keys` that are empty; `needed_by` is the command that needs them.
void require_keys(const LoadedConfig& config, std::initializer_list<std::string_view> keys,
                  std::string_view needed_by);

/// The configuration as a YAML file with every key, that reads back to the same values.
std::string config_yaml(const RunConfig& run);

/// The same with a comment on each line that says where the value came from.
std::string describe_config(const LoadedConfig& config);

/// All keys with default, allowed values and meaning: the Markdown page examples/configuration.md.
std::string config_reference();

}  // namespace layerstream
