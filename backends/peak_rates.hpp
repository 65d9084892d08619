#pragma once

#include <optional>
#include <string_view>

#include "core/dtype.hpp"

namespace layerstream {

/// FLOP/s of dense matrix multiplication on a device at its boost clock, accumulated in fp32, as its maker
/// publishes them; none for a device that is not listed.
/// @param description Device::description().
std::optional<double> peak_flops(std::string_view description, DType compute);

}  // namespace layerstream
