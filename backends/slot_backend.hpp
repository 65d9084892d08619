#pragma once

#include "backends/link.hpp"
#include "backends/memory_backend.hpp"
#include "backends/slot_table.hpp"

namespace layerstream {

/// What backends over a link have in common: tagged slots, and copies of gradients and activations.
class SlotBackend : public MemoryBackend {
 public:
  void attach_slots(std::span<void* const> slots, std::size_t bytes) final { table_.attach(slots, bytes); }
  WeightBinding acquire(int slot, int block, std::int64_t version) final {
    return table_.acquire(slot, block, version);
  }
  void release(int slot, int block) final { table_.release(slot, block); }
  void copy_to_host(void* host, const void* device, std::size_t bytes, StreamView stream) final {
    link_.copy(host, device, bytes, stream);
  }
  void copy_to_device(void* device, const void* host, std::size_t bytes, StreamView stream) final {
    link_.copy(device, host, bytes, stream);
  }

 protected:
  /// @param link outlives the backend.
  explicit SlotBackend(Link& link) : link_(link) {}

  Link& link_;
  SlotTable table_;
};

}  // namespace layerstream
