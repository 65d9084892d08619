#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/run_directory.hpp"

namespace layerstream::report {

/// A name and a value for people: {"best eval loss", "2.3145 (step 400)"}.
using Figure = std::pair<std::string, std::string>;

/// A run in a few figures. Those without a value are left out.
std::vector<Figure> figures_of(const RunDirectory& run);

}  // namespace layerstream::report
