#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string_view>

#include "io/append_file.hpp"
#include "io/metrics.hpp"

namespace layerstream::io {

/// An event file of TensorBoard, "events.out.tfevents.TIME.HOST.PID": numbers under the tags that Hugging
/// Face's TensorBoardCallback gives them, train/loss and eval/loss for loss and eval_loss. NaN and infinities
/// are written as they are.
class TensorBoardMetrics final : public MetricsSink {
 public:
  /// Begins a file in `directory`, which is made where it is not there. What earlier files have of steps
  /// after `resumed_step` is superseded. Throws FileError.
  explicit TensorBoardMetrics(const std::filesystem::path& directory, std::int64_t resumed_step = 0,
                              std::shared_ptr<FileSystem> files = std::make_shared<FileSystem>());

  std::string_view name() const override { return "the TensorBoard events"; }
  void write(std::int64_t step, std::initializer_list<Metric> metrics) override;

 private:
  std::unique_ptr<AppendFile> file_;
};

}  // namespace layerstream::io
