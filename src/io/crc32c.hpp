#pragma once

#include <cstdint>
#include <string_view>

namespace layerstream::io {

/// CRC-32C (Castagnoli), as RFC 3720, appendix B.4, gives examples of.
std::uint32_t crc32c(std::string_view bytes);

}  // namespace layerstream::io
