#pragma once

#include <memory>
#include <vector>

#include "backends/device.hpp"
#include "engine/executor.hpp"

namespace layerstream {

/// When an operation ran on its lane: seconds from the beginning of the run.
struct OperationTime {
  double begin = 0.0;  ///< its dependencies were met and the lane was free
  double end = 0.0;
};

/// Times every operation where it runs: on a GPU by the device's own clock, so that issuing ahead does not
/// count. Off until asked for.
class OperationTimes final : public ExecutionObserver {
 public:
  /// @param device outlives this object.
  explicit OperationTimes(Device& device);

  /// From the next run on.
  void set_enabled(bool enabled) { enabled_ = enabled; }
  /// Of the last run, by operation. @pre times were on during it, and it ended without an exception.
  std::vector<OperationTime> read() const;

  void begin(const Schedule& schedule) override;
  void before(int index, const Operation& operation) override { mark(2 * index, operation); }
  void after(int index, const Operation& operation) override { mark(2 * index + 1, operation); }

 private:
  void mark(int index, const Operation& operation) {
    if (timing_) clock_->mark(static_cast<std::size_t>(index), device_.stream(operation.lane));
  }

  Device& device_;
  std::unique_ptr<DeviceClock> clock_;
  bool enabled_ = false;
  bool timing_ = false;  ///< in this run
  std::size_t num_operations_ = 0;
};

}  // namespace layerstream
