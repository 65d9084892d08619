#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "engine/operation_times.hpp"
#include "engine/schedule.hpp"

namespace layerstream {

/// A run of operations as a timeline that ui.perfetto.dev and chrome://tracing open: one row a lane, one
/// slice an operation with block, chunk, piece, bytes, FLOPs and step as arguments, and an arrow to each from
/// the operation of another lane that it waited for last. Times in µs. Format: "Trace Event Format" (Google,
/// 2016).
/// @param times by operation.
std::string trace_json(const Schedule& schedule, std::span<const OperationTime> times);

/// The same as a file. Throws FileError.
void write_trace(const std::filesystem::path& path, const Schedule& schedule,
                 std::span<const OperationTime> times);

}  // namespace layerstream
