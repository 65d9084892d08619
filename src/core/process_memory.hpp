#pragma once

#include <cstddef>

namespace layerstream {

/// Memory of this process as the kernel counts it, in bytes; 0 where it does not say.
struct ProcessMemory {
  std::size_t resident = 0;  ///< VmRSS
  std::size_t peak = 0;      ///< VmHWM

  static ProcessMemory now();
};

}  // namespace layerstream
