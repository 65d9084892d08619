#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/append_file.hpp"
#include "io/metrics.hpp"

namespace layerstream::io {

/// metrics.csv: a line of names, then a line for each of metrics.jsonl. What a line does not have, and NaN
/// and infinities, are empty cells.
class CsvMetrics final : public MetricsSink {
 public:
  /// As MetricsWriter: lines of steps after `resumed_step` are cut off. Throws FileError, also for a file
  /// that has lines of something else.
  explicit CsvMetrics(std::filesystem::path path, std::int64_t resumed_step = 0,
                      std::shared_ptr<FileSystem> files = std::make_shared<FileSystem>());

  std::string_view name() const override { return "metrics.csv"; }
  /// A metric that no line had before becomes a further column, for which the file is written anew.
  void write(std::int64_t step, std::initializer_list<Metric> metrics) override;

 private:
  bool has_columns_of(std::initializer_list<Metric> metrics) const;
  void add_columns_of(std::initializer_list<Metric> metrics);

  std::shared_ptr<FileSystem> files_;
  std::filesystem::path path_;
  std::vector<std::string> columns_;  ///< after "step"
  std::unique_ptr<AppendFile> file_;
};

}  // namespace layerstream::io
