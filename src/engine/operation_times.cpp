#include "engine/operation_times.hpp"

namespace layerstream {

OperationTimes::OperationTimes(Device& device) : device_(device), clock_(device.make_clock()) {}

void OperationTimes::begin(const Schedule& schedule) {
  timing_ = enabled_;
  num_operations_ = schedule.operations.size();
  if (timing_) clock_->restart(2 * num_operations_);
}

std::vector<OperationTime> OperationTimes::read() const {
  LAYERSTREAM_EXPECT(timing_, "the last run was not timed");
  std::vector<OperationTime> times;
  times.reserve(num_operations_);
  for (std::size_t i = 0; i < num_operations_; ++i) {
    times.push_back({.begin = clock_->seconds(2 * i), .end = clock_->seconds(2 * i + 1)});
  }
  return times;
}

}  // namespace layerstream
