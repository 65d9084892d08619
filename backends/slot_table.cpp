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

const SlotTable::Slot& SlotTable::at(int slot, const std::string& wanted) const {
  LAYERSTREAM_EXPECT(slot >= 0 && slot < static_cast<int>(slots_.size()), "{}: there is no slot {} of {}",
                     wanted, slot, slots_.size());
  return slots_[static_cast<std::size_t>(slot)];
}

void* SlotTable::begin_fetch(int slot, int block, std::int64_t version, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::string wanted = fmt::format("fetch of block {} version {}", block, version);
  const Slot& found = at(slot, wanted);
  LAYERSTREAM_EXPECT(block >= 0, "{} into slot {}", wanted, slot);
  LAYERSTREAM_EXPECT(found.block < 0, "{}: slot {} still {}", wanted, slot, found.describe());
  LAYERSTREAM_EXPECT(bytes <= bytes_, "{} needs {} B, slot {} has {} B", wanted, bytes, slot, bytes_);
  void* const data = found.data;
  slots_[static_cast<std::size_t>(slot)] = {.data = data, .block = block, .version = version, .binding = {}};
  return data;
}

void SlotTable::bind(int slot, WeightBinding binding) {
  const std::lock_guard lock(mutex_);
  const Slot& found = at(slot, "bind");
  LAYERSTREAM_EXPECT(found.block >= 0, "bind: slot {} {}", slot, found.describe());
  slots_[static_cast<std::size_t>(slot)].binding = std::move(binding);
}

WeightBinding SlotTable::acquire(int slot, int block, std::int64_t version) const {
  const std::lock_guard lock(mutex_);
  const std::string wanted = fmt::format("acquire of block {} version {}", block, version);
  const Slot& found = at(slot, wanted);
  LAYERSTREAM_EXPECT(block >= 0 && found.block == block && found.version == version, "{}: slot {} {}", wanted,
                     slot, found.describe());
  LAYERSTREAM_EXPECT(!found.binding.empty(), "{}: slot {} is still being fetched", wanted, slot);
  return found.binding;
}

void SlotTable::release(int slot, int block) {
  const std::lock_guard lock(mutex_);
  const std::string wanted = fmt::format("release of block {}", block);
  const Slot& found = at(slot, wanted);
  LAYERSTREAM_EXPECT(block >= 0 && found.block == block, "{}: slot {} {}", wanted, slot, found.describe());
  slots_[static_cast<std::size_t>(slot)] = {.data = found.data, .binding = {}};
}

std::string SlotTable::Slot::describe() const {
  return block < 0 ? "is free" : fmt::format("holds block {} version {}", block, version);
}

}  // namespace layerstream
