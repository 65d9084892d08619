#pragma once

#include "backends/link.hpp"
#include "backends/memory_backend.hpp"
#include "backends/slot_table.hpp"

namespace layerstream {

/// Everything a block needs is copied into a device slot on the h2d lane, ahead of use.
class ExplicitBackend final : public MemoryBackend {
 public:
  /// @param link outlives the backend.
  explicit ExplicitBackend(Link& link) : link_(link) {}

  std::string name() const override { return "explicit"; }
  Lane fetch_lane() const override { return Lane::h2d; }
  std::size_t slot_bytes(const BlockSource& source) const override;
  void attach_slots(std::span<void* const> slots, std::size_t bytes) override { table_.attach(slots, bytes); }
  void fetch(int slot, int block, std::int64_t version, const BlockSource& source,
             StreamView stream) override;
  WeightBinding acquire(int slot, int block, std::int64_t version) override {
    return table_.acquire(slot, block, version);
  }
  void release(int slot, int block) override { table_.release(slot, block); }
  void copy_to_host(void* host, const void* device, std::size_t bytes, StreamView stream) override {
    link_.copy(host, device, bytes, stream);
  }
  void copy_to_device(void* device, const void* host, std::size_t bytes, StreamView stream) override {
    link_.copy(device, host, bytes, stream);
  }

 private:
  Link& link_;
  SlotTable table_;
};

}  // namespace layerstream
