#pragma once

#include <chrono>
#include <vector>

#include "backends/device_clock.hpp"
#include "core/error.hpp"

namespace layerstream {

/// For a device whose work is done when the call returns: the steady clock.
class HostClock final : public DeviceClock {
 public:
  void restart(std::size_t marks) override {
    marks_.assign(marks, {});
    base_ = Clock::now();
  }
  void mark(std::size_t index, StreamView) override { marks_.at(index) = Clock::now(); }
  double seconds(std::size_t index) const override {
    const Clock::time_point mark = marks_.at(index);
    LAYERSTREAM_EXPECT(mark != Clock::time_point{}, "mark {} was not set", index);
    return std::chrono::duration<double>(mark - base_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point base_;
  std::vector<Clock::time_point> marks_;
};

}  // namespace layerstream
