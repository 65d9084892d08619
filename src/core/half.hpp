#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define LAYERSTREAM_FUNCTION __host__ __device__
#else
#define LAYERSTREAM_FUNCTION
#endif

namespace layerstream {

/// bfloat16 as it lies in memory. Arithmetic happens in float. (Kokkos' bhalf_t is a float in CPU
/// builds, so it cannot describe storage.)
struct bf16 {
  std::uint16_t bits;
};

/// IEEE binary16 as it lies in memory; it occurs only in files.
struct fp16 {
  std::uint16_t bits;
};

/// An FP32 number as two 16-bit halves: `hi` is a bf16 rounded to nearest, ties away from zero, and
/// hi and lo together are the exact FP32 bits.
struct SplitFloat {
  bf16 hi;
  std::int16_t lo;
};

namespace detail {
LAYERSTREAM_FUNCTION inline float float_from_bits(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
LAYERSTREAM_FUNCTION inline std::uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}
}  // namespace detail

/// Exact.
LAYERSTREAM_FUNCTION inline float to_float(bf16 value) {
  return detail::float_from_bits(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Round to nearest, ties to even; NaN stays NaN. This is the rounding of activations and gradients.
LAYERSTREAM_FUNCTION inline bf16 to_bf16(float value) {
  std::uint32_t bits = detail::bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return bf16{static_cast<std::uint16_t>(bits >> 16)};
}

/// Split an FP32 weight: hi = (bits + 0x8000) >> 16, lo = int16(bits - (hi << 16)). Every bit pattern
/// survives split and merge, NaN and Inf included. For finite |value| that rounds past the largest
/// bf16, hi alone reads as infinity; such a weight has no bf16.
LAYERSTREAM_FUNCTION inline SplitFloat split(float value) {
  const std::uint32_t bits = detail::bits_of(value);
  const std::uint32_t hi = (bits + 0x8000u) >> 16;
  return {bf16{static_cast<std::uint16_t>(hi)},
          static_cast<std::int16_t>(static_cast<std::uint16_t>(bits - (hi << 16)))};
}

/// The exact FP32 of two halves: (hi << 16) + sign-extended lo, modulo 2^32.
LAYERSTREAM_FUNCTION inline float merge(bf16 hi, std::int16_t lo) {
  return detail::float_from_bits((static_cast<std::uint32_t>(hi.bits) << 16) +
                                 static_cast<std::uint32_t>(static_cast<std::int32_t>(lo)));
}

/// Exact, subnormals and infinities included.
LAYERSTREAM_FUNCTION inline float to_float(fp16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1fu) return detail::float_from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return detail::float_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign != 0 ? -magnitude : magnitude;
}

/// Round to nearest, ties to even; overflow becomes infinity.
LAYERSTREAM_FUNCTION inline fp16 to_fp16(float value) {
  const std::uint32_t bits = detail::bits_of(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return fp16{static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return fp16{static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
    const float shifted = detail::float_from_bits(magnitude) + 0.5f;
    return fp16{static_cast<std::uint16_t>(sign | (detail::bits_of(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return fp16{static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace layerstream
