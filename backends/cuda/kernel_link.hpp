#pragma once

#include "backends/link.hpp"

namespace layerstream {

/// Copies by a kernel of few thread blocks, between memories that kernels reach: for links that kernels use
/// better than the copy engines do (`layerstream calibrate` measures both).
class KernelLink final : public Link {
 public:
  /// @pre the stream's device reaches both ranges. Asynchronous.
  void copy(void* to, const void* from, std::size_t bytes, StreamView stream) override;
};

}  // namespace layerstream
