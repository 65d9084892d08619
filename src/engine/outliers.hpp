#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace layerstream {

/// The last values of a series, in which the next may stand out.
class RecentValues {
 public:
  static constexpr std::size_t window = 128;

  RecentValues() = default;
  /// @param values the oldest first; of more than `window` the last count.
  explicit RecentValues(std::vector<double> values);

  /// How many standard deviations (of the window) `value` lies above the window's mean; nothing before there
  /// are `window` values. Infinite above a window of equal values.
  std::optional<double> zscore(double value) const;
  /// @param value finite
  void add(double value);

  /// The oldest first.
  const std::vector<double>& values() const { return values_; }
  bool operator==(const RecentValues&) const = default;

 private:
  std::vector<double> values_;
};

}  // namespace layerstream
