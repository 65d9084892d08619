#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "backends/device.hpp"

namespace layerstream {

/// Seconds that pieces of work take on a lane, by the device's clock.
class DeviceTimer {
 public:
  /// @param device outlives this object. @param budget seconds that a measurement takes, about.
  DeviceTimer(Device& device, double budget)
      : device_(device), budget_(budget), clock_(device.make_clock()) {}

  /// Of one call of `work`, which orders itself on `stream`: the median over rounds that fill the budget.
  /// Work that takes longer than the budget is done twice, the first time to make plans and touch memory.
  double seconds_of(StreamView stream, const std::function<void()>& work) const {
    const double first = once(stream, work, 1);
    double estimate = first < budget_ ? once(stream, work, 1) : first;
    if (first >= budget_) return std::min(first, once(stream, work, 1));
    // Short pieces are timed many at a time, so that the clock's grain and the first launch do not count.
    constexpr double round_seconds = 0.01;
    const int repeats = std::clamp(static_cast<int>(round_seconds / std::max(estimate, 1e-7)), 1, 1000);
    const int rounds = std::clamp(static_cast<int>(budget_ / std::max(estimate * repeats, 1e-4)), 3, 25);
    std::vector<double> seconds;
    for (int round = 0; round < rounds; ++round) seconds.push_back(once(stream, work, repeats));
    std::ranges::nth_element(seconds, seconds.begin() + rounds / 2);
    return seconds[static_cast<std::size_t>(rounds / 2)];
  }

 private:
  double once(StreamView stream, const std::function<void()>& work, int repeats) const {
    clock_->restart(2);
    clock_->mark(0, stream);
    for (int i = 0; i < repeats; ++i) work();
    clock_->mark(1, stream);
    device_.synchronize();
    return (clock_->seconds(1) - clock_->seconds(0)) / repeats;
  }

  Device& device_;
  double budget_;
  std::unique_ptr<DeviceClock> clock_;
};

}  // namespace layerstream
