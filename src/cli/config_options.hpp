#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "core/config.hpp"

namespace layerstream::cli {

/// CONFIG [--set key=value]... [--print-config], shared by the commands that take a configuration.
struct ConfigOptions {
  std::string path;
  std::vector<std::string> overrides;
  bool print = false;

  void add_to(CLI::App& command);
  LoadedConfig load() const;
  /// Prints the configuration if that is asked for; true: nothing else is to be done.
  bool print_if_asked(const LoadedConfig& config) const;
};

}  // namespace layerstream::cli
