#pragma once

#include <Kokkos_Macros.hpp>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "ops/detail/dispatch.hpp"
#include "ops/detail/execution.hpp"

/// Before a loop whose iterations a device must unroll, to keep arrays in registers or several reads under
/// way.
#if defined(__CUDACC__)
#define LAYERSTREAM_UNROLL _Pragma("unroll")
#else
#define LAYERSTREAM_UNROLL
#endif

/// Runs of neighbouring elements that a kernel body handles at once: one element for a CPU thread, whose
/// loops the compiler vectorises, 16 bytes for a lane of a device. Bodies are written once, for any width.
namespace layerstream::ops::detail {

/// Elements of T in one access of a device lane.
template <class T>
inline constexpr int lane_width = static_cast<int>(16 / sizeof(T));

/// Elements [first, first + count()) of a row. With Whole, always N elements and aligned, so that memory is
/// accessed 8 or 16 bytes at a time; otherwise element by element, and the elements from count() on do not
/// exist. Which elements meet in a piece is the same in both cases, so sums over pieces are as well.
template <int N, bool Whole>
struct Piece {
  static constexpr int width = N;
  std::int64_t first;
  std::int64_t available = N;  ///< elements of the row from `first` on; not positive: none

  KOKKOS_FORCEINLINE_FUNCTION bool has(int k) const {
    if constexpr (Whole) {
      (void)k;
      return true;
    } else {
      return k < available;
    }
  }
};

/// N numbers of one piece.
template <class T, int N>
struct Values {
  T at[N];
};

/// True where pieces of `width` elements may be whole: every extent is a multiple of it, and so is the
/// alignment of every pointer one of 16 bytes.
inline bool whole_pieces(int width, std::initializer_list<std::int64_t> extents,
                         std::initializer_list<const void*> pointers) {
  for (const std::int64_t extent : extents) {
    if (extent % width != 0) return false;
  }
  for (const void* pointer : pointers) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

#if defined(KOKKOS_ENABLE_CUDA)
/// The type of one access to `bytes` aligned bytes.
template <std::size_t bytes>
using Access = std::conditional_t<bytes % 16 == 0, uint4, uint2>;
template <class T, int N, bool Whole>
inline constexpr bool is_wide = Whole&& N * sizeof(T) % 8 == 0;
#else
template <std::size_t bytes>
using Access = std::uint64_t;
template <class T, int N, bool Whole>
inline constexpr bool is_wide = false;
#endif

/// One store to global memory; the compiler may take a plain one of a vector type apart.
template <class Word>
KOKKOS_FORCEINLINE_FUNCTION void store_access(Word* target, const Word& word) {
#if defined(__CUDA_ARCH__)
  const std::size_t address = __cvta_generic_to_global(target);
  if constexpr (sizeof(Word) == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word.x), "r"(word.y),
                 "r"(word.z), "r"(word.w)
                 : "memory");
  } else {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(word.x), "r"(word.y) : "memory");
  }
#else
  *target = word;
#endif
}

/// As they lie in memory; elements that do not exist are `missing`.
template <class T, int N, bool Whole>
KOKKOS_FORCEINLINE_FUNCTION Values<T, N> load_stored(const Piece<N, Whole>& piece, const T* row,
                                                     T missing = T{}) {
  Values<T, N> values;
  const T* source = row + piece.first;
  if constexpr (is_wide<T, N, Whole>) {
    using Word = Access<sizeof values>;
    constexpr int words = sizeof values / sizeof(Word);
    Word word[words];
    for (int i = 0; i < words; ++i) word[i] = reinterpret_cast<const Word*>(source)[i];
    memcpy(values.at, word, sizeof values);
    (void)missing;
  } else {
    for (int k = 0; k < N; ++k) values.at[k] = piece.has(k) ? source[k] : missing;
  }
  return values;
}

/// Widened to the type of the arithmetic.
template <class T, int N>
KOKKOS_FORCEINLINE_FUNCTION Values<MathOf<T>, N> widened(const Values<T, N>& stored) {
  Values<MathOf<T>, N> values;
  for (int k = 0; k < N; ++k) values.at[k] = load(stored.at[k]);
  return values;
}

template <class T, int N, bool Whole>
KOKKOS_FORCEINLINE_FUNCTION Values<MathOf<T>, N> load_piece(const Piece<N, Whole>& piece, const T* row) {
  return widened(load_stored(piece, row));
}

template <class T, int N, bool Whole>
KOKKOS_FORCEINLINE_FUNCTION void store_stored(const Piece<N, Whole>& piece, T* row,
                                              const Values<T, N>& values) {
  T* target = row + piece.first;
  if constexpr (is_wide<T, N, Whole>) {
    using Word = Access<sizeof values>;
    constexpr int words = sizeof values / sizeof(Word);
    Word word[words];
    memcpy(word, values.at, sizeof values);
    for (int i = 0; i < words; ++i) store_access(reinterpret_cast<Word*>(target) + i, word[i]);
  } else {
    for (int k = 0; k < N; ++k) {
      if (piece.has(k)) target[k] = values.at[k];
    }
  }
}

/// Each rounded once.
template <class T, int N, bool Whole>
KOKKOS_FORCEINLINE_FUNCTION void store_piece(const Piece<N, Whole>& piece, T* row,
                                             const Values<MathOf<T>, N>& values) {
  Values<T, N> stored;
  for (int k = 0; k < N; ++k) stored.at[k] = store_as<T>(values.at[k]);
  store_stored(piece, row, stored);
}

}  // namespace layerstream::ops::detail
