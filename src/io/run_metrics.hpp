#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/log.hpp"
#include "io/metrics.hpp"

namespace layerstream::io {

/// metrics.jsonl of a run's output directory, and what `report_to` asks for beside it. A place that cannot be
/// written any more is given up with a warning: hours of training weigh more than their log.
class RunMetrics {
 public:
  /// @param report_to "csv": metrics.csv; "tensorboard": event files in tensorboard/. @param resumed_step
  /// what is there of later steps is cut off or superseded. Throws FileError.
  RunMetrics(const std::filesystem::path& output_dir, std::span<const std::string> report_to,
             std::int64_t resumed_step, const Log& log,
             const std::shared_ptr<FileSystem>& files = std::make_shared<FileSystem>());

  /// One line. Does not throw for a disk that fails.
  void write(std::int64_t step, std::initializer_list<Metric> metrics);

 private:
  Log log_;
  std::vector<std::unique_ptr<MetricsSink>> sinks_;
};

}  // namespace layerstream::io
