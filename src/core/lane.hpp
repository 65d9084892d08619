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
  // The device's share of the optimizer has lanes of its own, so that neither pass waits for the other; what
  // it needs from the host comes on h2d.
  update,      ///< optimizer kernels
  update_out,  ///< copies of optimizer state from device to host
};

inline constexpr std::array all_lanes{Lane::compute, Lane::h2d,    Lane::d2h,
                                      Lane::host,    Lane::update, Lane::update_out};

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
    case Lane::update:
      return "update";
    case Lane::update_out:
      return "update_out";
  }
  return "?";
}

}  // namespace layerstream
