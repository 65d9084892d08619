#pragma once

#include <cstdint>

namespace layerstream {

/// How the angles of the rotary embedding are computed: in FP64 and rounded once, or with Hugging Face's fp32
/// inverse frequencies and fp32 products, for bit parity with transformers.
enum class RopePrecision : std::uint8_t { exact, hf };

}  // namespace layerstream
