#pragma once

#include <Kokkos_Macros.hpp>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/dtype.hpp"
#include "core/error.hpp"
#include "core/half.hpp"

namespace layerstream::ops::detail {

template <class T>
struct ElementTraits {
  using Math = T;
};
template <>
struct ElementTraits<bf16> {
  using Math = float;
};

/// The type in which a kernel computes with elements stored as T, which is also T's accumulator type.
template <class T>
using MathOf = typename ElementTraits<T>::Math;

/// Exact widening of a stored element to its math type.
KOKKOS_INLINE_FUNCTION double load(double value) {
  return value;
}
KOKKOS_INLINE_FUNCTION float load(float value) {
  return value;
}
KOKKOS_INLINE_FUNCTION float load(bf16 value) {
  return to_float(value);
}

/// Rounds once to the stored type T. For bf16 the bits are those of to_bf16, written without a branch so
/// that loops vectorise; a GPU does it in one instruction, which makes every NaN the same NaN.
template <class T>
KOKKOS_INLINE_FUNCTION T store_as(MathOf<T> value) {
  if constexpr (std::is_same_v<T, bf16>) {
#if defined(__CUDA_ARCH__)
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
#else
    const std::uint32_t bits = layerstream::detail::bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return bf16{static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
#endif
  } else {
    return value;
  }
}

/// `value` after a round trip through the stored type T.
template <class T>
KOKKOS_INLINE_FUNCTION MathOf<T> rounded_to(MathOf<T> value) {
  return load(store_as<T>(value));
}

template <class T>
struct TypeTag {
  using Type = T;
};

/// Calls `function(TypeTag<T>{})` with the storage type of a compute dtype: double, float or bf16.
/// @throws ContractError naming `operation` for any other dtype.
template <class Function>
decltype(auto) dispatch_compute(DType dtype, const char* operation, Function&& function) {
  switch (dtype) {
    case DType::f64:
      return std::forward<Function>(function)(TypeTag<double>{});
    case DType::f32:
      return std::forward<Function>(function)(TypeTag<float>{});
    case DType::bf16:
      return std::forward<Function>(function)(TypeTag<bf16>{});
    default:
      throw ContractError(
          fmt::format("{}: {} is no compute dtype; it takes fp64, fp32 or bf16", operation, name_of(dtype)));
  }
}

}  // namespace layerstream::ops::detail
