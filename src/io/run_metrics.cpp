#include "io/run_metrics.hpp"

#include <algorithm>

#include "io/metrics_csv.hpp"
#include "io/metrics_tensorboard.hpp"

namespace layerstream::io {

RunMetrics::RunMetrics(const std::filesystem::path& output_dir, std::span<const std::string> report_to,
                       std::int64_t resumed_step, const Log& log, const std::shared_ptr<FileSystem>& files)
    : log_(log) {
  const auto wanted = [&](std::string_view name) {
    return std::ranges::find(report_to, name) != report_to.end();
  };
  sinks_.push_back(std::make_unique<MetricsWriter>(output_dir / "metrics.jsonl", resumed_step, files));
  if (wanted("csv"))
    sinks_.push_back(std::make_unique<CsvMetrics>(output_dir / "metrics.csv", resumed_step, files));
  if (wanted("tensorboard")) {
    sinks_.push_back(std::make_unique<TensorBoardMetrics>(output_dir / "tensorboard", resumed_step, files));
  }
}

void RunMetrics::write(std::int64_t step, std::initializer_list<Metric> metrics) {
  std::erase_if(sinks_, [&](const std::unique_ptr<MetricsSink>& sink) {
    try {
      sink->write(step, metrics);
      return false;
    } catch (const FileError& error) {
      log_.warning("{}; this run goes on without {}", error.what(), sink->name());
      return true;
    }
  });
}

}  // namespace layerstream::io
