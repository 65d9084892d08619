#include <new>

#include "tests/support/device_memory.hpp"

namespace layerstream::test {

constexpr std::align_val_t alignment{256};

void* allocate_for_device(std::size_t bytes) {
  return ::operator new(bytes, alignment);
}

void free_for_device(void* memory, std::size_t) noexcept {
  ::operator delete(memory, alignment);
}

void wait_for_device() {}

}  // namespace layerstream::test
