#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.hpp"

namespace layerstream {

/// Where bytes live: the GPU's HBM (or its simulation), or the CPU's DRAM.
enum class Space : std::uint8_t { device, host };

constexpr std::string_view name_of(Space space) {
  return space == Space::device ? "device" : "host";
}

struct LedgerLine {
  Space space;
  std::string component;
  std::size_t bytes;
};

/// Every byte the engine holds, by component. `plan` fills one without allocating, the run fills one
/// while allocating, and the two must be equal.
class Ledger {
 public:
  /// Adds to the line (space, component), which appears in order of first mention.
  void add(Space space, std::string_view component, std::size_t bytes);

  std::size_t total(Space space) const;
  const std::vector<LedgerLine>& lines() const { return lines_; }

  /// A table for people: one line per component, totals per space.
  std::string to_table() const;

 private:
  std::vector<LedgerLine> lines_;
};

/// Hands out aligned pieces of one region and writes each into a ledger. A *dry* arena has no memory:
/// running the code that lays out buffers against it gives the exact size that the real arena needs,
/// so plan and run cannot differ.
class Arena {
 public:
  static constexpr std::size_t alignment = 256;

  /// An arena without memory; its pointers must not be dereferenced.
  static Arena dry(Space space, Ledger& ledger);

  /// An arena over [base, base + capacity); base aligned to `alignment`. Does not own the memory.
  Arena(Space space, void* base, std::size_t capacity, Ledger& ledger);

  Space space() const { return space_; }
  bool is_dry() const { return base_ == nullptr; }
  std::size_t used() const { return used_; }

  /// Throws ContractError when the region is exhausted: the plan was wrong.
  void* allocate(std::size_t bytes, std::string_view component);
  TensorView tensor(DType dtype, Shape shape, std::string_view component);

 private:
  Arena(Space space, Ledger& ledger) : space_(space), ledger_(&ledger) {}

  Space space_;
  std::byte* base_ = nullptr;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
  Ledger* ledger_;
};

/// "1.50 GiB", "12.0 MiB", "300 B".
std::string format_bytes(std::size_t bytes);

}  // namespace layerstream
