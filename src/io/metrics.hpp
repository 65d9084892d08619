#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "io/append_file.hpp"
#include "io/file_system.hpp"

namespace layerstream::io {

using MetricValue = std::variant<std::int64_t, double, bool, std::string>;
using Metric = std::pair<std::string_view, MetricValue>;

/// Where a run writes what it measures of its steps.
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  /// "metrics.jsonl": for messages.
  virtual std::string_view name() const = 0;
  /// Throws FileError; what was written before stays readable.
  virtual void write(std::int64_t step, std::initializer_list<Metric> metrics) = 0;
};

/// metrics.jsonl: a JSON object per line, {"step": n, ...}, each line handed to the kernel when it is
/// written, so that a killed run keeps it.
class MetricsWriter final : public MetricsSink {
 public:
  /// Opens `path` for appending. Lines of steps after `resumed_step` are cut off, with all that follows them
  /// (the run repeats those steps), and so is a last line that an interrupted run has left unfinished.
  /// A new run passes 0, or a path that is not there yet.
  /// Throws FileError, also for a line before the last that is not a JSON object (file and line are named).
  explicit MetricsWriter(std::filesystem::path path, std::int64_t resumed_step = 0,
                         std::shared_ptr<FileSystem> files = std::make_shared<FileSystem>());

  std::string_view name() const override { return "metrics.jsonl"; }
  /// Appends one line, fields in the given order. NaN and infinities, which JSON lacks, become null.
  void write(std::int64_t step, std::initializer_list<Metric> metrics) override;

 private:
  AppendFile file_;
};

}  // namespace layerstream::io
