#include "backends/make_device.hpp"

#include "backends/simulated_device.hpp"

namespace layerstream {

std::unique_ptr<Device> make_device(std::optional<std::size_t> memory_limit, std::size_t host_bytes) {
  return std::make_unique<SimulatedDevice>(memory_limit.value_or(host_bytes));
}

}  // namespace layerstream
