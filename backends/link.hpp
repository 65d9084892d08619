#pragma once

#include <cstddef>
#include <cstring>

#include "core/stream.hpp"

namespace layerstream {

/// Moves bytes over a link: how they get there is the only difference between a CPU build (memcpy) and a
/// CUDA build (cudaMemcpyAsync on the lane's stream).
class Link {
 public:
  virtual ~Link() = default;
  virtual void copy(void* to, const void* from, std::size_t bytes, StreamView stream) = 0;
};

/// The link of the simulated device.
class MemcpyLink final : public Link {
 public:
  void copy(void* to, const void* from, std::size_t bytes, StreamView) override {
    if (bytes > 0) std::memcpy(to, from, bytes);  // a null pointer is fine when nothing moves
  }
};

}  // namespace layerstream
