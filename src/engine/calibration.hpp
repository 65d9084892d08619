#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "backends/device.hpp"
#include "model/spec.hpp"
#include "profiles/hardware/hardware_profile.hpp"

namespace layerstream {

struct CalibrationOptions {
  std::size_t host_bytes = std::size_t{4} << 30;    ///< at most; pinned
  std::size_t device_bytes = std::size_t{6} << 30;  ///< at most
  std::int64_t largest_chunk = 16384;               ///< tokens of the products' curve
  double seconds_per_rate = 0.4;                    ///< each number is measured for about so long
  double warm_up_seconds = 6.0;                     ///< of matrix products, until a card's clock has settled
  std::size_t host_budget = 0;                      ///< bytes that this process may hold
  int threads = 1;                                  ///< of the optimizer, at most
};

/// What a machine was measured to do, with notes that a profile has no keys for.
struct Calibration {
  HardwareProfile profile;
  std::string notes;  ///< lines: link by size of the copies, host AdamW by threads
};

/// Measures this machine with the kernels, copies and threads that training uses, matrix products and
/// attention at the model's shapes, in less than two minutes. Host and device should be idle. Blocks;
/// allocates as the options say and frees it again.
/// @param source what the profile's numbers name as theirs. @param progress told what is measured next.
/// Throws ResourceError if memory is short or cannot be pinned.
Calibration calibrate(Device& device, const ModelSpec& spec, const CalibrationOptions& options,
                      std::string_view source, const std::function<void(std::string_view)>& progress);

}  // namespace layerstream
