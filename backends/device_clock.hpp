#pragma once

#include <cstddef>

#include "core/stream.hpp"

namespace layerstream {

/// Tells when lanes reached points in their work. A mark allocates nothing and waits for nothing.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  /// Forgets all marks, makes room for `marks` of them and counts from now. Blocks until the compute lane's
  /// stream is idle; between runs only.
  virtual void restart(std::size_t marks) = 0;
  /// Stamped when the work ordered on `stream` so far is done; at once for StreamView::host(). Each index at
  /// most once between restarts; threads may set different marks at the same time.
  virtual void mark(std::size_t index, StreamView stream) = 0;
  /// From the restart to the mark. @pre the marked work is done. Throws ContractError for a mark not set.
  virtual double seconds(std::size_t index) const = 0;
};

}  // namespace layerstream
