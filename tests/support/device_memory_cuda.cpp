#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <vector>

#include "core/cuda_error.hpp"
#include "tests/support/device_memory.hpp"

namespace layerstream::test {
namespace {

/// Pinning costs more than most tests' kernels, so what has been pinned once is used again.
class FreeBlocks {
 public:
  /// Null if there is none of this size.
  void* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& blocks = blocks_[bytes];
    if (blocks.empty()) return nullptr;
    void* const memory = blocks.back();
    blocks.pop_back();
    return memory;
  }
  void put(void* memory, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_[bytes].push_back(memory);
  }

 private:
  std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> blocks_;
};

/// Never destroyed: at the end of the program CUDA may be gone before static objects are.
FreeBlocks& free_blocks() {
  static FreeBlocks* const blocks = new FreeBlocks;
  return *blocks;
}

constexpr std::size_t rounded_up(std::size_t bytes) {
  return bytes == 0 ? 256 : (bytes + 255) / 256 * 256;
}

}  // namespace

void* allocate_for_device(std::size_t bytes) {
  void* memory = free_blocks().take(rounded_up(bytes));
  if (memory == nullptr) {
    LAYERSTREAM_CUDA(cudaHostAlloc(&memory, rounded_up(bytes), cudaHostAllocPortable | cudaHostAllocMapped));
  }
  return memory;
}

void free_for_device(void* memory, std::size_t bytes) noexcept {
  if (memory == nullptr) return;
  (void)cudaDeviceSynchronize();  // an error stays and is reported by the next check
  free_blocks().put(memory, rounded_up(bytes));
}

void wait_for_device() {
  LAYERSTREAM_CUDA(cudaDeviceSynchronize());
}

}  // namespace layerstream::test
