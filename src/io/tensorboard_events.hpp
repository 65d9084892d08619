#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// The part of TensorFlow's event files that scalars need: tensorflow/core/util/event.proto and
// tensorflow/core/framework/summary.proto, each message in a TFRecord
// (tensorflow/core/lib/io/record_writer.h).
namespace layerstream::io {

/// A value under its tag: "train/loss".
using Scalar = std::pair<std::string, float>;

/// Event{wall_time, file_version}: what a file begins with.
std::string version_event(double wall_time);
/// Event{wall_time, step, session_log{status: START}}: readers forget what they read of `step` and later
/// ones.
std::string restart_event(double wall_time, std::int64_t step);
/// Event{wall_time, step, summary{value{tag, simple_value} ...}}.
std::string scalar_event(double wall_time, std::int64_t step, const std::vector<Scalar>& scalars);

/// A record: length, its masked CRC, the event, its masked CRC; little-endian.
std::string tf_record(std::string_view event);

}  // namespace layerstream::io
