#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config_value.hpp"
#include "core/run_config.hpp"

namespace layerstream {

/// One key of the configuration. The list of these is the only description of the keys: parsing,
/// validation, printing and the reference table all read it.
struct ConfigField {
  std::string_view section;
  std::string_view key;
  std::string_view meaning;
  std::string allowed;                            ///< as told to the user: "integer >= 1"
  std::vector<std::string_view> names_elsewhere;  ///< what other tools call it: suggested, never accepted
  /// Stores the value; false if it is not of the key's type.
  std::function<bool(RunConfig&, const ConfigValue&)> assign;
  /// Whether the stored value is in the key's range.
  std::function<bool(const RunConfig&)> in_range;
  /// The stored value as YAML.
  std::function<std::string(const RunConfig&)> show;
};

/// All keys, in the order in which they are printed.
std::vector<ConfigField> config_schema();

/// The keys of lr_scheduler_kwargs, which are among them.
std::vector<ConfigField> lr_scheduler_fields(std::string_view section);

/// The key most likely meant by `word`, or "" if none is near.
std::string_view suggest_key(const std::vector<ConfigField>& schema, std::string_view word);

}  // namespace layerstream
