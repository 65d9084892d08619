#include "backends/make_device.hpp"

#include "backends/cuda/cuda_device.hpp"

namespace layerstream {

std::unique_ptr<Device> make_device(std::optional<std::size_t> memory_limit, std::size_t) {
  return std::make_unique<CudaDevice>(memory_limit);
}

}  // namespace layerstream
