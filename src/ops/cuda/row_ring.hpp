#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/cuda/team.hpp"

/// Rows of several arrays on their way into shared memory, some ahead of the row that a block works on. Each
/// lane copies pieces of 16 bytes for itself only, so arrival needs no barrier.
namespace layerstream::ops::cuda {

#if defined(__CUDACC__)

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

/// The next rows first, first + step, ... of `Arrays` arrays, `Kept` pieces of each to a lane, in a ring of
/// `Stages` places: the current row, and those under way. Memory is the block's dynamic shared memory.
template <class T, int Arrays, int Kept, int Stages, bool Whole>
class RowRing {
 public:
  static constexpr int width = detail::lane_width<T>;
  using Stored = detail::Values<T, width>;
  static_assert(Stages >= 2 && sizeof(Stored) == sizeof(uint4));

  static std::size_t bytes(int lanes) {
    return static_cast<std::size_t>(lanes) * words_of_lane * sizeof(uint4);
  }

  /// Asks for the first rows. @param rows that the block has in all
  __device__ RowRing(const Team<Whole>& team, const T* const (&arrays)[Arrays], std::int64_t size,
                     std::int64_t first, std::int64_t step, int rows)
      : to_ask_(rows), row_stride_(step * size), piece_stride_(team.lanes * width) {
    extern __shared__ uint4 block_memory[];
    memory_ = block_memory + team.lane * words_of_lane;
#pragma unroll
    for (int a = 0; a < Arrays; ++a) next_[a] = arrays[a] + first * size + team.lane * width;
#pragma unroll
    for (int k = 0; k < Kept; ++k)
      available_[k] = static_cast<int>(size) - team.lane * width - k * piece_stride_;
    for (int word = 0; word < Stages * words_of_stage; ++word) {
      if (!has(word % Kept)) memory_[word] = uint4{};
    }
#pragma unroll
    for (int stage = 0; stage < Stages - 1; ++stage) ask(stage * words_of_stage);
  }

  /// Waits for the next row, which becomes the current one, and asks for another in place of the last.
  __device__ void advance() {
    const int last = current_;
    current_ = last == (Stages - 1) * words_of_stage ? 0 : last + words_of_stage;
    asm volatile("cp.async.wait_group %0;" ::"n"(Stages - 2) : "memory");
    ask(last);
  }

  /// Piece k of the current row; zeros where the lane has none.
  __device__ Stored piece(int array, int k) const {
    const uint4 word = memory_[current_ + array * Kept + k];
    Stored values;
    memcpy(values.at, &word, sizeof word);
    return values;
  }

  __device__ bool has(int k) const {
    return available_[k] > 0;
  }
  /// Where piece k lies from the lane's first element of a row on.
  __device__ detail::Piece<width, Whole> place(int k) const {
    return {static_cast<std::int64_t>(k) * piece_stride_, available_[k]};
  }

 private:
  static constexpr int words_of_stage = Arrays * Kept;
  /// Odd, so that words of eight neighbouring lanes lie in different banks.
  static constexpr int words_of_lane = Stages * words_of_stage | 1;

  /// One group of copies, empty after the last row, so that groups can be counted.
  __device__ void ask(int stage) {
    if (to_ask_ > 0) {
      --to_ask_;
#pragma unroll
      for (int a = 0; a < Arrays; ++a) {
#pragma unroll
        for (int k = 0; k < Kept; ++k) {
          if (has(k)) copy(memory_ + stage + a * Kept + k, next_[a], place(k));
        }
        next_[a] += row_stride_;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  static __device__ void copy(uint4* target, const T* source, const detail::Piece<width, Whole>& place) {
    if constexpr (Whole) {
      const auto address = static_cast<unsigned>(__cvta_generic_to_shared(target));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address),
                   "l"(__cvta_generic_to_global(source + place.first))
                   : "memory");
    } else {
      const Stored values = detail::load_stored(place, source);
      memcpy(target, values.at, sizeof values);
    }
  }

  uint4* memory_;  // of the lane: (Stages, Arrays, Kept)
  const T* next_[Arrays];
  int current_ = (Stages - 1) * words_of_stage, to_ask_, available_[Kept];
  std::int64_t row_stride_;
  int piece_stride_;
};

/// Sums over the lanes of a block, one after another, with one barrier each: two places for what the warps
/// found take turns.
template <class A, int Count>
class LaneSums {
 public:
  static constexpr int most_warps = 16;
  using Sums = detail::Values<A, Count>;

  /// Called by all lanes; the memory is of the block.
  __device__ explicit LaneSums(int lane) : lane_(lane) {
    if (lane < most_warps) of_warp()[0][lane] = of_warp()[1][lane] = Sums{};
    __syncthreads();
  }

  /// A tree within each warp, then a tree over 16 warps, missing ones as zeros; alike on all lanes.
  __device__ void add(Sums& sums) {
#pragma unroll
    for (int i = 0; i < Count; ++i) sums.at[i] = sum_across_warp(sums.at[i]);
    Sums* const places = of_warp()[turn_];
    turn_ ^= 1;
    if (lane_ % warp_lanes == 0) places[lane_ / warp_lanes] = sums;
    __syncthreads();
    sums = places[lane_ % most_warps];
#pragma unroll
    for (int i = 0; i < Count; ++i) sums.at[i] = sum_in_run(sums.at[i], most_warps);
  }

 private:
  using Places = Sums[2][most_warps];
  static __device__ Places& of_warp() {
    __shared__ Places places;
    return places;
  }
  int lane_, turn_ = 0;
};

#endif

}  // namespace layerstream::ops::cuda
