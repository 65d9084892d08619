#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "report/comparison.hpp"
#include "report/run_directory.hpp"

namespace layerstream::report {

/// What the page's script reads: {"title", "figures": [[name, value]...], "comparison": null | {"figures",
/// "configuration"}, "runs": [{"name", "path", "training": {"step": [...], field: [...]}, "evaluation",
/// "record", "timeline"}...]}. NaN is null. Numbers of curves have seven significant digits.
nlohmann::ordered_json report_data(const RunDirectory& run);
/// The same of several runs, without timelines. @param comparison of them.
nlohmann::ordered_json compare_data(std::span<const RunDirectory> runs, const Comparison& comparison);

/// A page that needs nothing but itself: style, script and data are in it.
std::string html_page(const nlohmann::ordered_json& data);

}  // namespace layerstream::report
