#pragma once

#include <Kokkos_Core.hpp>

#include "ops/detail/vector.hpp"

/// The lanes of one Kokkos team on a CUDA device: neighbouring threads of one block, a multiple of 32.
namespace layerstream::ops::cuda {

inline constexpr int warp_lanes = 32;
inline constexpr unsigned all_lanes = 0xffffffffu;

/// value + the same of the lanes whose numbers differ in the bits [lowest, 32): a tree, alike on all of them.
template <class A>
KOKKOS_INLINE_FUNCTION A sum_across_warp(A value, int lowest = 1) {
#if defined(__CUDA_ARCH__)
  for (int offset = warp_lanes / 2; offset >= lowest; offset /= 2) {
    value += __shfl_xor_sync(all_lanes, value, offset);
  }
#endif
  return value;
}

/// The sum over runs of `lanes` (a power of two up to 32) neighbouring lanes, alike on all of them.
template <class A>
KOKKOS_INLINE_FUNCTION A sum_in_run(A value, int lanes) {
#if defined(__CUDA_ARCH__)
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
#endif
  return value;
}

KOKKOS_INLINE_FUNCTION void barrier() {
#if defined(__CUDA_ARCH__)
  __syncthreads();
#endif
}

/// True on every lane of the team if it is on any; also a barrier.
KOKKOS_INLINE_FUNCTION bool any_lane(bool condition) {
#if defined(__CUDA_ARCH__)
  return __syncthreads_or(condition) != 0;
#else
  return condition;
#endif
}

/// Which lanes of the caller's warp have it, lane 0 in the lowest bit.
KOKKOS_INLINE_FUNCTION unsigned lanes_with(bool condition) {
#if defined(__CUDA_ARCH__)
  return __ballot_sync(all_lanes, condition);
#else
  return condition ? 1u : 0u;
#endif
}

/// A group (see detail/launch.hpp) of `lanes` lanes. All functions with a result for the team are called by
/// all of its lanes together.
template <bool Whole>
struct Team {
  static constexpr bool is_team = true;
  static constexpr bool whole = Whole;
  int lane, lanes;

  KOKKOS_INLINE_FUNCTION bool is_leader() const { return lane == 0; }
  KOKKOS_INLINE_FUNCTION int warp() const { return lane / warp_lanes; }
  KOKKOS_INLINE_FUNCTION int warps() const { return lanes / warp_lanes; }

  /// The k-th piece of this lane in a row of n elements; it has none from the first with first >= n on.
  template <int W>
  KOKKOS_INLINE_FUNCTION detail::Piece<W, Whole> piece(int k, std::int64_t n) const {
    const std::int64_t first = (static_cast<std::int64_t>(k) * lanes + lane) * W;
    return {first, n - first};
  }

  template <int W, class F>
  KOKKOS_INLINE_FUNCTION void for_each_piece(std::int64_t n, const F& f) const {
    const std::int64_t step = static_cast<std::int64_t>(lanes) * W;
    for (std::int64_t first = static_cast<std::int64_t>(lane) * W; first < n; first += step) {
      f(detail::Piece<W, Whole>{first, n - first});
    }
  }

  template <class F>
  KOKKOS_INLINE_FUNCTION void for_each(std::int64_t n, const F& f) const {
    for (std::int64_t i = lane; i < n; i += lanes) f(i);
  }

  /// f(piece) added over the lane's pieces in order, then over the lanes.
  template <class A, int W, class F>
  KOKKOS_INLINE_FUNCTION A sum_pieces(std::int64_t n, const F& f) const {
    A partial{};
    const std::int64_t step = static_cast<std::int64_t>(lanes) * W;
#pragma unroll 4
    for (std::int64_t first = static_cast<std::int64_t>(lane) * W; first < n; first += step) {
      partial += static_cast<A>(f(detail::Piece<W, Whole>{first, n - first}));
    }
    return sum_of_lanes(partial);
  }

  /// A tree within each warp, then the warps in order; alike on all lanes.
  template <class A>
  KOKKOS_INLINE_FUNCTION A sum_of_lanes(A value) const {
    return combine(sum_across_warp(value), [](A a, A b) { return a + b; });
  }

  /// The sums of two values each.
  template <class A>
  KOKKOS_INLINE_FUNCTION void sum_of_lanes(A& first, A& second) const {
    struct Pair {
      A first, second;
    };
    const Pair total = combine(Pair{sum_across_warp(first), sum_across_warp(second)}, [](Pair a, Pair b) {
      return Pair{a.first + b.first, a.second + b.second};
    });
    first = total.first;
    second = total.second;
  }

  /// @pre no value is NaN
  template <class A>
  KOKKOS_INLINE_FUNCTION A max_of_lanes(A value) const {
    const auto larger = [](A a, A b) { return b > a ? b : a; };
#if defined(__CUDA_ARCH__)
    for (int offset = warp_lanes / 2; offset > 0; offset /= 2) {
      value = larger(value, __shfl_xor_sync(all_lanes, value, offset));
    }
#endif
    return combine(value, larger);
  }

 private:
  /// Joins one value per warp, each alike on its lanes, in the order of warps.
  template <class A, class Join>
  KOKKOS_INLINE_FUNCTION A combine(A value, const Join& join) const {
#if defined(__CUDA_ARCH__)
    if (lanes == warp_lanes) return value;
    __shared__ A of_warp[32];
    if (lane % warp_lanes == 0) of_warp[warp()] = value;
    __syncthreads();
    value = of_warp[0];
    for (int w = 1; w < warps(); ++w) value = join(value, of_warp[w]);
    __syncthreads();
#else
    (void)join;
#endif
    return value;
  }
};

}  // namespace layerstream::ops::cuda
