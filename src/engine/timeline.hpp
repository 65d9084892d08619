#pragma once

#include <span>
#include <string>

#include "engine/operation_times.hpp"
#include "engine/schedule.hpp"
#include "engine/step_report.hpp"

namespace layerstream {

/// A step for `layerstream report`, in a form that is small enough to be written of every run: what
/// trace_json tells without its arrows, a number for each thing told of an operation, and the report's
/// figures.
///
///   {"step", "seconds", "model_flops", "device_flops",
///    "lanes": [{"name", "busy", "bytes"}...], "link": {"to_device": {"busy", "bytes"}, "to_host": ...},
///    "waits": {"weights": seconds, ...}, "kinds": [names],
///    "operations": {"lane": [indices], "kind": [indices], "block", "chunk", "begin": [µs], "end": [µs]}}
///
/// @param times by operation. @param report made of them.
std::string timeline_json(const Schedule& schedule, std::span<const OperationTime> times,
                          const StepReport& report);

}  // namespace layerstream
