#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "backends/memory_backend.hpp"

namespace layerstream {

/// The tags of a ring of slots, shared by backends: which block, which version, in what state.
/// Thread-safe. Every call out of order is a ContractError that names slot, block and version.
class SlotTable {
 public:
  void attach(std::span<void* const> slots, std::size_t bytes);

  /// The slot becomes (block, version). It must be free, and `bytes` must fit. Returns its memory.
  void* begin_fetch(int slot, int block, std::int64_t version, std::size_t bytes);
  /// Where the fetched slabs can be read; after begin_fetch.
  void bind(int slot, WeightBinding binding);
  /// Checks the tag. Returns what was bound.
  WeightBinding acquire(int slot, int block, std::int64_t version) const;
  /// The slot becomes free.
  void release(int slot, int block);

 private:
  struct Slot {
    void* data = nullptr;
    int block = -1;  ///< −1: free
    std::int64_t version = 0;
    WeightBinding binding;

    std::string describe() const;  ///< "is free", "holds block 3 version 7"
  };
  /// @param wanted what the caller is about, for the message.
  const Slot& at(int slot, const std::string& wanted) const;

  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::size_t bytes_ = 0;
};

}  // namespace layerstream
