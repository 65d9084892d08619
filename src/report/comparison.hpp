#pragma once

#include <span>
#include <string>
#include <vector>

#include "report/run_directory.hpp"

namespace layerstream::report {

/// A thing that runs have different values of; by run, empty where a run does not have it.
struct Difference {
  std::string name;
  std::vector<std::string> values;
};

/// Several runs side by side.
struct Comparison {
  std::vector<std::string> names;  ///< of the runs: as short as tells them apart
  std::vector<Difference> figures;
  /// Configuration keys, but for output_dir, and what a run tells of its model, device and program, of which
  /// not all runs have the same.
  std::vector<Difference> configuration;

  /// Two tables for a terminal.
  std::string to_text() const;
};

/// @pre at least one run.
Comparison compare(std::span<const RunDirectory> runs);

}  // namespace layerstream::report
