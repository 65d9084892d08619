#include "engine/outliers.hpp"

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace layerstream {

RecentValues::RecentValues(std::vector<double> values) : values_(std::move(values)) {
  if (values_.size() > window) values_.erase(values_.begin(), values_.end() - window);
}

std::optional<double> RecentValues::zscore(double value) const {
  if (values_.size() < window) return {};
  constexpr auto count = static_cast<double>(window);
  const double mean = std::accumulate(values_.begin(), values_.end(), 0.0) / count;
  double squares = 0.0;
  for (const double seen : values_) squares += (seen - mean) * (seen - mean);
  const double deviation = std::sqrt(squares / count);
  if (deviation > 0.0) return (value - mean) / deviation;
  return value > mean ? std::numeric_limits<double>::infinity() : 0.0;
}

void RecentValues::add(double value) {
  if (values_.size() == window) values_.erase(values_.begin());
  values_.push_back(value);
}

}  // namespace layerstream
