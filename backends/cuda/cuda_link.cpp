#include "backends/cuda/cuda_link.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/cuda_error.hpp"

namespace layerstream {
namespace {

cudaStream_t native(StreamView stream) {
  return static_cast<cudaStream_t>(stream.native());
}

void copy_pinned(void* to, const void* from, std::size_t bytes, StreamView stream) {
  LAYERSTREAM_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)));
}

cudaMemoryType type_of(const void* address) {
  cudaPointerAttributes attributes{};
  LAYERSTREAM_CUDA(cudaPointerGetAttributes(&attributes, address));
  return attributes.type;
}

}  // namespace

/// Two pinned buffers that take turns, so that the CPU's copy of one piece runs beside the link's of another.
class CudaLink::StagingRing {
 public:
  StagingRing() {
    for (Slot& slot : slots_) {
      LAYERSTREAM_CUDA(cudaHostAlloc(&slot.buffer, slot_bytes, cudaHostAllocDefault));
      LAYERSTREAM_CUDA(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming | cudaEventBlockingSync));
    }
  }
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  void to_device(std::byte* to, const std::byte* from, std::size_t bytes, StreamView stream) {
    for (std::size_t at = 0; at < bytes; at += slot_bytes) {
      const std::size_t count = std::min(slot_bytes, bytes - at);
      Slot& slot = next();
      LAYERSTREAM_CUDA(cudaEventSynchronize(slot.done));
      std::memcpy(slot.buffer, from + at, count);
      copy_pinned(to + at, slot.buffer, count, stream);
      LAYERSTREAM_CUDA(cudaEventRecord(slot.done, native(stream)));
    }
  }

  void to_host(std::byte* to, const std::byte* from, std::size_t bytes, StreamView stream) {
    std::byte* target = nullptr;  // of the piece under way
    std::size_t pending = 0;
    Slot* arriving = nullptr;
    for (std::size_t at = 0; at < bytes; at += slot_bytes) {
      const std::size_t count = std::min(slot_bytes, bytes - at);
      Slot& slot = next();
      LAYERSTREAM_CUDA(cudaEventSynchronize(slot.done));
      copy_pinned(slot.buffer, from + at, count, stream);
      LAYERSTREAM_CUDA(cudaEventRecord(slot.done, native(stream)));
      if (arriving != nullptr) arriving->deliver(target, pending);
      arriving = &slot;
      target = to + at;
      pending = count;
    }
    if (arriving != nullptr) arriving->deliver(target, pending);
  }

 private:
  static constexpr std::size_t slot_bytes = std::size_t{8} << 20;
  struct Slot {
    Slot() = default;
    ~Slot() {
      if (done != nullptr) cudaEventDestroy(done);
      if (buffer != nullptr) cudaFreeHost(buffer);
    }
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;

    void* buffer = nullptr;
    cudaEvent_t done = nullptr;

    void deliver(std::byte* to, std::size_t bytes) const {
      LAYERSTREAM_CUDA(cudaEventSynchronize(done));
      std::memcpy(to, buffer, bytes);
    }
  };

  Slot& next() {
    turn_ = (turn_ + 1) % slots_.size();
    return slots_[turn_];
  }

  std::array<Slot, 2> slots_;
  std::size_t turn_ = 0;
};

CudaLink::CudaLink(PageableCopies pageable) : pageable_(pageable) {}
CudaLink::~CudaLink() = default;

void CudaLink::add(const PinnedRange& range) {
  const std::lock_guard lock(mutex_);
  ranges_.push_back(&range);
}

void CudaLink::remove(const PinnedRange& range) {
  const std::lock_guard lock(mutex_);
  ranges_.remove(&range);
}

CudaLink::Side CudaLink::side_of(const void* address, std::size_t bytes) {
  const bool direct = pageable_ == PageableCopies::direct;
  {
    const std::lock_guard lock(mutex_);
    for (const PinnedRange* range : ranges_) {
      if (!range->contains(address)) continue;
      const PinnedRange::Run run = range->run_from(address);
      return {std::min(bytes, run.bytes), !run.pinned && !direct};
    }
  }
  return {bytes, !direct && type_of(address) == cudaMemoryTypeUnregistered};
}

CudaLink::StagingRing& CudaLink::ring_of(StreamView stream) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<StagingRing>& ring = rings_[stream.native()];
  if (!ring) ring = std::make_unique<StagingRing>();
  return *ring;
}

void CudaLink::copy(void* to, const void* from, std::size_t bytes, StreamView stream) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    const Side there = side_of(target, bytes);
    const Side here = side_of(source, bytes);
    const std::size_t count = std::min(there.bytes, here.bytes);
    LAYERSTREAM_EXPECT(!(there.staged && here.staged), "a copy from host memory to host memory");
    if (there.staged) {
      ring_of(stream).to_host(target, source, count, stream);
    } else if (here.staged) {
      ring_of(stream).to_device(target, source, count, stream);
    } else {
      copy_pinned(target, source, count, stream);
    }
    target += count;
    source += count;
    bytes -= count;
  }
}

}  // namespace layerstream
