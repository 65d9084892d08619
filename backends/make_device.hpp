#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "backends/device.hpp"

namespace layerstream {

/// The device of this build: the GPU in a CUDA build, a simulated one otherwise.
/// @param memory_limit bytes of it that may be used. @param host_bytes the limit of a simulated device
/// that is given none, since its memory is the host's.
std::unique_ptr<Device> make_device(std::optional<std::size_t> memory_limit, std::size_t host_bytes);

}  // namespace layerstream
