#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/dtype.hpp"

namespace layerstream::io {

std::optional<DType> dtype_from_safetensors(std::string_view name);

/// "F64, F32, ...": for messages.
std::string safetensors_dtype_list();

/// Bytes of a tensor; nothing if an extent is negative, or if the extents' product, in order, or the
/// bytes overflow 63 bits.
std::optional<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape);

}  // namespace layerstream::io
