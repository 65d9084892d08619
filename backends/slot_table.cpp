#include "backends/slot_table.hpp"

#include <utility>

#include "core/error.hpp"

namespace layerstream {

void SlotTable::attach(std::span<void* const> slots, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  slots_.clear();
  for (void* const data : slots) slots_.push_back({.data = data, .binding = {}});
  bytes_ = bytes;
}

const SlotTable::Slot& SlotTable::at(int slot) const {
  LAYERSTREAM_EXPECT(slot >= 0 && slot < static_cast<int>(slots_.size()), "slot {} of {}", slot,
                     slots_.size());
  return slots_[static_cast<std::size_t>(slot)];
}

void* SlotTable::begin_fetch(int slot, int block, std::int64_t version, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const Slot& found = at(slot);
  LAYERSTREAM_EXPECT(found.block < 0, "slot {} still holds block {} version {} when block {} is fetched",
                     slot, found.block, found.version, block);
  LAYERSTREAM_EXPECT(bytes <= bytes_, "block {} needs {} B, slots have {} B", block, bytes, bytes_);
  void* const data = found.data;
  slots_[static_cast<std::size_t>(slot)] = {.data = data, .block = block, .version = version, .binding = {}};
  return data;
}

void SlotTable::bind(int slot, WeightBinding binding) {
  const std::lock_guard lock(mutex_);
  LAYERSTREAM_EXPECT(at(slot).block >= 0, "slot {} is free", slot);
  slots_[static_cast<std::size_t>(slot)].binding = std::move(binding);
}

WeightBinding SlotTable::acquire(int slot, int block, std::int64_t version) const {
  const std::lock_guard lock(mutex_);
  const Slot& found = at(slot);
  LAYERSTREAM_EXPECT(found.block == block && found.version == version,
                     "slot {} holds block {} version {}, wanted block {} version {}", slot, found.block,
                     found.version, block, version);
  return found.binding;
}

void SlotTable::release(int slot, int block) {
  const std::lock_guard lock(mutex_);
  const Slot& found = at(slot);
  LAYERSTREAM_EXPECT(found.block == block, "slot {} holds block {}, released as block {}", slot, found.block,
                     block);
  slots_[static_cast<std::size_t>(slot)].block = -1;
}

}  // namespace layerstream
