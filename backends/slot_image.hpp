#pragma once

#include <cstddef>

#include "backends/memory_backend.hpp"
#include "core/ledger.hpp"

namespace layerstream {

/// Lays the parts of slabs one after another in a slot, each part on an arena boundary.
class SlotImage {
 public:
  /// @param base the slot's memory, or null to count bytes only.
  explicit SlotImage(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <class T>
  T* place(std::int64_t elements) {
    std::byte* const piece = base_ == nullptr ? nullptr : base_ + bytes_;
    const std::size_t wanted = static_cast<std::size_t>(elements) * sizeof(T);
    bytes_ += (wanted + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
    return reinterpret_cast<T*>(piece);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

}  // namespace layerstream
