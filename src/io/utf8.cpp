#include "io/utf8.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <cstring>

namespace layerstream::io {

namespace {

/// Bytes that may follow a lead byte: `count` of them, the first in [first_low, first_high], the others in
/// [0x80, 0xbf].
struct Continuation {
  std::size_t count;
  unsigned char first_low = 0x80;
  unsigned char first_high = 0xbf;
};

std::optional<Continuation> continuation_of(unsigned char lead) {
  if (lead >= 0xc2 && lead <= 0xdf) return Continuation{1};
  if (lead == 0xe0) return Continuation{2, 0xa0, 0xbf};
  if (lead == 0xed) return Continuation{2, 0x80, 0x9f};
  if (lead >= 0xe1 && lead <= 0xef) return Continuation{2};
  if (lead == 0xf0) return Continuation{3, 0x90, 0xbf};
  if (lead >= 0xf1 && lead <= 0xf3) return Continuation{3};
  if (lead == 0xf4) return Continuation{3, 0x80, 0x8f};
  return std::nullopt;
}

std::string cause_of_lead(unsigned char lead) {
  if (lead <= 0xbf) return fmt::format("byte 0x{:02x} continues a character that was not begun", lead);
  if (lead <= 0xc1) return fmt::format("byte 0x{:02x} begins an overlong form", lead);
  return fmt::format("byte 0x{:02x} never occurs in UTF-8", lead);
}

std::string cause_of_second(unsigned char lead, unsigned char second) {
  if ((second & 0xc0) == 0x80) {
    if (lead == 0xe0 || lead == 0xf0) {
      return fmt::format("bytes 0x{:02x} 0x{:02x} begin an overlong form", lead, second);
    }
    if (lead == 0xed) return fmt::format("bytes 0x{:02x} 0x{:02x} begin a surrogate", lead, second);
    return fmt::format("bytes 0x{:02x} 0x{:02x} lie beyond U+10FFFF", lead, second);
  }
  return fmt::format("byte 0x{:02x} is followed by 0x{:02x}, which does not continue it", lead, second);
}

/// First position at or after `begin` with a byte that is not ASCII.
std::size_t skip_ascii(std::string_view text, std::size_t begin) {
  std::size_t i = begin;
  for (; i + 8 <= text.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i, 8);
    if ((word & 0x8080808080808080u) != 0) break;
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < 0x80) ++i;
  return i;
}

}  // namespace

std::optional<Utf8Fault> find_utf8_fault(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  std::size_t i = 0;
  while ((i = skip_ascii(text, i)) < text.size()) {
    const auto continuation = continuation_of(byte(i));
    if (!continuation) return Utf8Fault{i, 1, cause_of_lead(byte(i))};
    for (std::size_t k = 1; k <= continuation->count; ++k) {
      if (i + k == text.size()) return Utf8Fault{i, k, "the text ends inside a character"};
      const unsigned char low = k == 1 ? continuation->first_low : 0x80;
      const unsigned char high = k == 1 ? continuation->first_high : 0xbf;
      if (byte(i + k) >= low && byte(i + k) <= high) continue;
      if (k == 1) return Utf8Fault{i, 1, cause_of_second(byte(i), byte(i + 1))};
      return Utf8Fault{
          i, k, fmt::format("character begun by 0x{:02x} is cut short by 0x{:02x}", byte(i), byte(i + k))};
    }
    i += continuation->count + 1;
  }
  return std::nullopt;
}

}  // namespace layerstream::io
