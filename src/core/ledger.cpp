#include "core/ledger.hpp"

#include <algorithm>
#include <array>

namespace layerstream {
namespace {

std::size_t add_bytes(std::size_t a, std::size_t b, std::string_view component) {
  std::size_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw ResourceError(fmt::format("memory for {} is beyond 64 bits", component));
  }
  return sum;
}

}  // namespace

void Ledger::add(Space space, std::string_view component, std::size_t bytes) {
  const auto line = std::find_if(lines_.begin(), lines_.end(), [&](const LedgerLine& candidate) {
    return candidate.space == space && candidate.component == component;
  });
  if (line != lines_.end()) {
    line->bytes = add_bytes(line->bytes, bytes, component);
  } else {
    lines_.push_back({space, std::string(component), bytes});
  }
}

std::size_t Ledger::total(Space space) const {
  std::size_t sum = 0;
  for (const LedgerLine& line : lines_) {
    if (line.space == space) sum = add_bytes(sum, line.bytes, "the total");
  }
  return sum;
}

std::string Ledger::to_table() const {
  std::string table;
  for (const Space space : {Space::device, Space::host}) {
    for (const LedgerLine& line : lines_) {
      if (line.space != space) continue;
      table += fmt::format("  {:<7} {:<40} {:>12} {:>18}\n", name_of(space), line.component,
                           format_bytes(line.bytes), line.bytes);
    }
    table += fmt::format("  {:<7} {:<40} {:>12} {:>18}\n", name_of(space), "total",
                         format_bytes(total(space)), total(space));
  }
  return table;
}

Arena Arena::dry(Space space, Ledger& ledger) {
  return Arena(space, ledger);
}

Arena::Arena(Space space, void* base, std::size_t capacity, Ledger& ledger)
    : space_(space), base_(static_cast<std::byte*>(base)), capacity_(capacity), ledger_(&ledger) {
  LAYERSTREAM_EXPECT(base != nullptr && reinterpret_cast<std::uintptr_t>(base) % alignment == 0,
                     "an arena over unaligned memory");
}

void* Arena::allocate(std::size_t bytes, std::string_view component) {
  const std::size_t rounded = add_bytes(bytes, alignment - 1, component) / alignment * alignment;
  LAYERSTREAM_EXPECT(is_dry() || used_ + rounded <= capacity_,
                     "{} arena of {} B is full: {} asks for {} B after {} B", name_of(space_), capacity_,
                     component, bytes, used_);
  // A dry arena counts from a fictitious, non-null base, so that views over it do not read as absent.
  std::byte* const base = is_dry() ? reinterpret_cast<std::byte*>(alignment) : base_;
  std::byte* const piece = base + used_;
  used_ = add_bytes(used_, rounded, component);
  ledger_->add(space_, component, rounded);
  return piece;
}

TensorView Arena::tensor(DType dtype, Shape shape, std::string_view component) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<std::size_t>(shape.numel()), size_of(dtype), &bytes)) {
    throw ResourceError(fmt::format("memory for {} is beyond 64 bits", component));
  }
  return {allocate(bytes, component), dtype, shape};
}

std::string format_bytes(std::size_t bytes) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < units.size()) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, units[unit]);
}

}  // namespace layerstream
