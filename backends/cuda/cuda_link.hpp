#pragma once

#include <cuda_runtime_api.h>

#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "backends/link.hpp"
#include "backends/pinned_range.hpp"

namespace layerstream {

/// How host memory that is not pinned crosses the link.
enum class PageableCopies : bool {
  /// Through a small pinned ring of the stream's own: from the host, the call returns when all has been read;
  /// to the host, when all has arrived.
  staged,
  /// By the copy engines, for a device that shares the host's page tables. Whether the call returns before
  /// the copy is done is the driver's affair: memory must stay as it is until the stream is done with it.
  direct
};

/// Copies between host and device on the lane's stream. From and to pinned memory the copy engines do it and
/// the call returns at once.
class CudaLink final : public Link {
 public:
  explicit CudaLink(PageableCopies pageable = PageableCopies::staged);
  ~CudaLink() override;

  void copy(void* to, const void* from, std::size_t bytes, StreamView stream) override;

  /// Pinned memory that copies may use from now on. The range outlives its use by copies and removes itself.
  void add(const PinnedRange& range);
  void remove(const PinnedRange& range);

 private:
  class StagingRing;
  struct Side {
    std::size_t bytes;
    bool staged;
  };

  Side side_of(const void* address, std::size_t bytes);
  StagingRing& ring_of(StreamView stream);

  PageableCopies pageable_;
  std::mutex mutex_;
  std::list<const PinnedRange*> ranges_;
  std::map<void*, std::unique_ptr<StagingRing>> rings_;
};

}  // namespace layerstream
