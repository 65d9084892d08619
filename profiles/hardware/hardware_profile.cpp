#include "profiles/hardware/hardware_profile.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace layerstream {

double RateCurve::at(double size) const {
  LAYERSTREAM_EXPECT(!points_.empty() && size > 0.0, "a curve of {} points at {}", points_.size(), size);
  if (size <= points_.front().at) return points_.front().rate.value;
  if (size >= points_.back().at) return points_.back().rate.value;
  const auto right = std::ranges::upper_bound(points_, size, {}, &Point::at);
  const Point& a = *(right - 1);
  const Point& b = *right;
  const double part = std::log(size / a.at) / std::log(b.at / a.at);
  return a.rate.value + part * (b.rate.value - a.rate.value);
}

double HardwareProfile::host_memory_bytes_per_second() const {
  const double alone = adamw_bytes_per_parameter * host.adamw_parameters_per_second.value;
  const double together = adamw_bytes_per_parameter * host.adamw_beside_copies_parameters_per_second.value +
                          host.copies_beside_adamw_bytes_per_second.value;
  return std::max({alone, together, link.to_device_bytes_per_second.value,
                   link.to_host_bytes_per_second.value, link.duplex_bytes_per_second.value});
}

}  // namespace layerstream
