#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace layerstream {

/// Where an operation runs. Operations of one lane run in the order of the schedule; lanes run beside
/// each other.
enum class Lane : std::uint8_t {
  compute,  ///< the device's kernels
  h2d,      ///< copies from host to device
  d2h,      ///< copies from device to host
  host,     ///< optimizer and verdict on the CPU
};

inline constexpr std::array all_lanes{Lane::compute, Lane::h2d, Lane::d2h, Lane::host};

constexpr std::string_view name_of(Lane lane) {
  switch (lane) {
    case Lane::compute:
      return "compute";
    case Lane::h2d:
      return "h2d";
    case Lane::d2h:
      return "d2h";
    case Lane::host:
      return "host";
  }
  return "?";
}

}  // namespace layerstream
