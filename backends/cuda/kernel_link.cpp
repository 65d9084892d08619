#include "backends/cuda/kernel_link.hpp"

#include <algorithm>
#include <cstdint>

#include "core/cuda_error.hpp"

namespace layerstream {
namespace {

// A link is full with few bytes in flight: 16 blocks of 512 lanes, four loads of 16 bytes each, are 512 KiB.
constexpr int thread_blocks = 16, lanes = 512, loads = 4;

/// Of 16-byte words, then the bytes that are left.
__global__ void __launch_bounds__(lanes)
    copy_words(uint4* to, const uint4* from, std::int64_t words, std::uint8_t* to_bytes,
               const std::uint8_t* from_bytes, std::int64_t bytes) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * lanes;
  const std::int64_t lane = static_cast<std::int64_t>(blockIdx.x) * lanes + threadIdx.x;
  for (std::int64_t first = lane; first < words; first += loads * stride) {
    uint4 word[loads];
#pragma unroll
    for (int k = 0; k < loads; ++k) {
      if (first + k * stride < words) word[k] = from[first + k * stride];
    }
#pragma unroll
    for (int k = 0; k < loads; ++k) {
      if (first + k * stride < words) to[first + k * stride] = word[k];
    }
  }
  for (std::int64_t i = lane; i < bytes; i += stride) to_bytes[i] = from_bytes[i];
}

bool is_word_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(uint4) == 0;
}

}  // namespace

void KernelLink::copy(void* to, const void* from, std::size_t bytes, StreamView stream) {
  if (bytes == 0) return;
  const bool by_words = is_word_aligned(to) && is_word_aligned(from);
  const std::size_t words = by_words ? bytes / sizeof(uint4) : 0;
  const std::size_t moved = words * sizeof(uint4);
  copy_words<<<thread_blocks, lanes, 0, static_cast<cudaStream_t>(stream.native())>>>(
      static_cast<uint4*>(to), static_cast<const uint4*>(from), static_cast<std::int64_t>(words),
      static_cast<std::uint8_t*>(to) + moved, static_cast<const std::uint8_t*>(from) + moved,
      static_cast<std::int64_t>(bytes - moved));
  LAYERSTREAM_CUDA(cudaGetLastError());
}

}  // namespace layerstream
