#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/held_piece.hpp"

/// Reading ahead without registers.
namespace layerstream::ops::cuda {

/// Shared memory that a block can have on the smallest of the architectures from sm_80 on.
inline constexpr std::size_t most_shared_bytes = std::size_t{99} << 10;

/// Rounds of pieces that a lane has asked for and not yet used, `Depth` rounds of `Words` words of 16 bytes,
/// in its block's shared memory, and with Numbers an int32 with each. Only the lane itself touches them, so
/// there are no barriers: it asks for Depth rounds; then, round by round, waits for the oldest, takes it and
/// asks for one more in its place. Lanes of one block may have rings of other Words. Lanes: of a block, at
/// most.
template <int Words, int Depth, int Lanes, bool Numbers = false>
class LaneRing {
 public:
  static constexpr int depth = Depth;
  /// Shared memory of a block.
  static constexpr std::size_t bytes =
      std::size_t{Depth} * Lanes * (Words * sizeof(uint4) + (Numbers ? sizeof(std::int32_t) : 0));
  static_assert(bytes <= most_shared_bytes);

#if defined(__CUDACC__)
  /// @param memory of the block, aligned to 16 bytes
  __device__ explicit LaneRing(uint4* memory) : begin_(memory + threadIdx.x), at_(begin_) {
    if constexpr (Numbers) {
      number_ = reinterpret_cast<std::int32_t*>(memory + Depth * round) + threadIdx.x;
    }
  }

  /// Asks for a piece of up to 16 bytes, which gets this word of the round.
  template <class T, int N, bool Whole>
  __device__ void ask(int word, const detail::Piece<N, Whole>& piece, const T* row) {
    static_assert(N * sizeof(T) <= sizeof(uint4));
    if constexpr (detail::is_wide<T, N, Whole>) {
      const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(place_of(word)));
      const std::size_t global = __cvta_generic_to_global(row + piece.first);
      if constexpr (N * sizeof(T) == sizeof(uint4)) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
      } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
      }
    } else {
      uint4 held{};
      const detail::Values<T, N> values = detail::load_stored(piece, row);
      memcpy(&held, &values, sizeof values);
      *place_of(word) = held;
    }
  }
  /// Asks for the round's int32.
  __device__ void ask(const std::int32_t* number) {
    const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(number_));
    const std::size_t global = __cvta_generic_to_global(number);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
  }
  /// Ends a round, also one in which nothing was asked for, and goes to the oldest.
  __device__ void end_round() {
    asm volatile("cp.async.commit_group;" ::: "memory");
    at_ += round;
    if constexpr (Numbers) number_ += Lanes;
    if (at_ == begin_ + Depth * round) {
      at_ = begin_;
      if constexpr (Numbers) number_ -= Depth * Lanes;
    }
  }
  /// For the oldest of Depth rounds.
  __device__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(Depth - 1) : "memory");
  }
  /// The piece that has this word of the round; anything if it was not asked for.
  template <class T, int N, bool Whole>
  __device__ detail::HeldPiece<T, N, Whole> take(int word) const {
    static_assert(sizeof(detail::HeldPiece<T, N, Whole>) == N * sizeof(T));
    const uint4 words = *place_of(word);
    detail::HeldPiece<T, N, Whole> held;
    memcpy(&held, &words, sizeof held);
    return held;
  }
  __device__ std::int32_t number() const {
    return *number_;
  }

 private:
  __device__ uint4* place_of(int word) const {
    return at_ + word * Lanes;
  }

  static constexpr int round = Words * Lanes;
  uint4 *begin_, *at_;
  std::int32_t* number_ = nullptr;
#endif
};

}  // namespace layerstream::ops::cuda
