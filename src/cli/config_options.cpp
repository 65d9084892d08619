#include "cli/config_options.hpp"

#include <iostream>

namespace layerstream::cli {

void ConfigOptions::add_to(CLI::App& command) {
  command.add_option("config", path, "YAML file with the run's configuration")->required();
  command.add_option("--set", overrides, "key=value, overrides the file; may be given several times")
      ->allow_extra_args(false);
  command.add_flag("--print-config", print, "print every key, its value and where it came from, and stop");
}

LoadedConfig ConfigOptions::load() const {
  return load_config(path, overrides);
}

bool ConfigOptions::print_if_asked(const LoadedConfig& config) const {
  if (print) std::cout << describe_config(config);
  return print;
}

}  // namespace layerstream::cli
