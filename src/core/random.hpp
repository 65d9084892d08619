#pragma once

#include <array>
#include <cstdint>

namespace layerstream {

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): a pure function
/// of (key, counter), so the n-th number of a stream never depends on who asked for the others.
std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_low, std::uint64_t counter_high);

/// The `index`-th standard normal number of stream (seed, stream), by Box-Muller in double.
double normal_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

/// Numbers 2·pair and 2·pair + 1 of the stream, the same bits as `normal_at` gives, for less than the price
/// of two.
std::array<double, 2> normal_pair_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t pair);

/// The `index`-th uniform number in [0, 1) of stream (seed, stream), 53 bits.
double uniform_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

}  // namespace layerstream
