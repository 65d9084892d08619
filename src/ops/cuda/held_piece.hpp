#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/detail/vector.hpp"

/// Pieces between memory and registers of a CUDA device, and bf16 numbers two at a time.
#if defined(__CUDACC__)

namespace layerstream::ops::cuda {

/// As load_stored, for memory that is not read again soon: it leaves the level-2 cache first, so that the
/// numbers others have just written stay there instead of going to memory meanwhile.
template <class T, int N, bool Whole>
__device__ detail::Values<T, N> load_once(const detail::Piece<N, Whole>& piece, const T* row) {
  if constexpr (detail::is_wide<T, N, Whole>) {
    using Word = detail::Access<N * sizeof(T)>;
    constexpr int count = static_cast<int>(N * sizeof(T) / sizeof(Word));
    Word words[count];
#pragma unroll
    for (int i = 0; i < count; ++i) words[i] = __ldcs(reinterpret_cast<const Word*>(row + piece.first) + i);
    detail::Values<T, N> values;
    memcpy(values.at, words, sizeof values);
    return values;
  } else {
    return detail::load_stored(piece, row);
  }
}

/// Widened; of bf16 without taking words apart.
template <class T, int N>
__device__ detail::Values<detail::MathOf<T>, N> widen(const detail::Values<T, N>& stored) {
  if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
    std::uint32_t words[N / 2];
    memcpy(words, stored.at, sizeof words);
    detail::Values<float, N> values;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      values.at[2 * i] = __uint_as_float(words[i] << 16);
      values.at[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return values;
  } else {
    return detail::widened(stored);
  }
}

/// As widen, in other instructions: the assembler would otherwise hold the numbers of the first time until
/// the second, in twice the registers.
template <class T, int N>
__device__ detail::Values<detail::MathOf<T>, N> widen_again(const detail::Values<T, N>& stored) {
  if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
    std::uint32_t words[N / 2];
    memcpy(words, stored.at, sizeof words);
    detail::Values<float, N> values;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      std::uint32_t low, high;
      asm volatile("prmt.b32 %0, %1, 0, 0x1044;" : "=r"(low) : "r"(words[i]));
      asm volatile("prmt.b32 %0, %1, 0, 0x3244;" : "=r"(high) : "r"(words[i]));
      values.at[2 * i] = __uint_as_float(low);
      values.at[2 * i + 1] = __uint_as_float(high);
    }
    return values;
  } else {
    return detail::widened(stored);
  }
}

/// Each rounded once, with the bits of store_as; bf16 in pairs.
template <class T, int N>
__device__ detail::Values<T, N> round_to_stored(const detail::Values<detail::MathOf<T>, N>& values) {
  detail::Values<T, N> stored;
  if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
    std::uint32_t words[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
          : "=r"(words[i])
          : "f"(values.at[2 * i + 1]), "f"(values.at[2 * i]));
    }
    memcpy(stored.at, words, sizeof words);
  } else {
    for (int k = 0; k < N; ++k) stored.at[k] = detail::store_as<T>(values.at[k]);
  }
  return stored;
}

}  // namespace layerstream::ops::cuda

#endif

namespace layerstream::ops::detail {

/// A piece as it lies in memory, in as few registers as it has bytes: what is read ahead of its use.
template <class T, int N, bool Whole>
struct HeldPiece {
  static constexpr bool wide = is_wide<T, N, Whole>;
  using Word = std::conditional_t<wide, Access<N * sizeof(T)>, Values<T, N>>;
  static constexpr int count = static_cast<int>(N * sizeof(T) / sizeof(Word));
  Word words[count];

  KOKKOS_FORCEINLINE_FUNCTION void read(const Piece<N, Whole>& piece, const T* row) {
    if constexpr (wide) {
      const auto* const source = reinterpret_cast<const Word*>(row + piece.first);
      LAYERSTREAM_UNROLL
      for (int i = 0; i < count; ++i) words[i] = source[i];
    } else {
      words[0] = load_stored(piece, row);
    }
  }
  KOKKOS_FORCEINLINE_FUNCTION Values<T, N> stored() const {
    Values<T, N> values;
    memcpy(values.at, words, sizeof values);
    return values;
  }
  KOKKOS_FORCEINLINE_FUNCTION Values<MathOf<T>, N> numbers() const {
#if defined(__CUDA_ARCH__)
    return cuda::widen(stored());
#else
    return widened(stored());
#endif
  }
};

}  // namespace layerstream::ops::detail
