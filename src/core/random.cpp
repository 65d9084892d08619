#include "core/random.hpp"

#include <cmath>
#include <numbers>

namespace layerstream {

std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_low,
                                    std::uint64_t counter_high) {
  constexpr std::uint64_t multiplier0 = 0xD2511F53u;
  constexpr std::uint64_t multiplier1 = 0xCD9E8D57u;
  std::uint32_t key0 = static_cast<std::uint32_t>(key);
  std::uint32_t key1 = static_cast<std::uint32_t>(key >> 32);
  std::array<std::uint32_t, 4> c{
      static_cast<std::uint32_t>(counter_low), static_cast<std::uint32_t>(counter_low >> 32),
      static_cast<std::uint32_t>(counter_high), static_cast<std::uint32_t>(counter_high >> 32)};
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = multiplier0 * c[0];
    const std::uint64_t product1 = multiplier1 * c[2];
    c = {static_cast<std::uint32_t>(product1 >> 32) ^ c[1] ^ key0, static_cast<std::uint32_t>(product1),
         static_cast<std::uint32_t>(product0 >> 32) ^ c[3] ^ key1, static_cast<std::uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

namespace {
double to_unit(std::uint32_t high, std::uint32_t low) {
  const std::uint64_t bits = (static_cast<std::uint64_t>(high) << 32) | low;
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}
}  // namespace

double uniform_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const auto word = philox(seed, index, stream);
  return to_unit(word[0], word[1]);
}

std::array<double, 2> normal_pair_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t pair) {
  const auto word = philox(seed, pair, stream);
  const double radius = std::sqrt(-2.0 * std::log1p(-to_unit(word[0], word[1])));
  const double angle = 2.0 * std::numbers::pi * to_unit(word[2], word[3]);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

double normal_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return normal_pair_at(seed, stream, index >> 1)[index & 1u];
}

}  // namespace layerstream
