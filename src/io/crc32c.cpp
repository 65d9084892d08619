#include "io/crc32c.hpp"

#include <array>

namespace layerstream::io {
namespace {

constexpr std::uint32_t polynomial = 0x82f63b78U;  // reflected

/// [b]: the remainder of byte b.
constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit)
      remainder = (remainder & 1U) != 0U ? (remainder >> 1U) ^ polynomial : remainder >> 1U;
    table[byte] = remainder;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> table = make_table();

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0U;
  for (const char c : bytes) crc = table[(crc ^ static_cast<unsigned char>(c)) & 0xffU] ^ (crc >> 8U);
  return ~crc;
}

}  // namespace layerstream::io
