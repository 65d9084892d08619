#include "core/half.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace layerstream {
namespace {

float from_bits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

bool survives(std::uint32_t bits) {
  const SplitFloat halves = split(from_bits(bits));
  return bits_of(merge(halves.hi, halves.lo)) == bits;
}

TEST(SplitFloat, EveryHighHalfWithEveryEdgeOfTheLowHalfSurvivesSplitAndMerge) {
  for (std::uint32_t high = 0; high <= 0xffff; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      ASSERT_TRUE(survives(high << 16 | low)) << std::hex << (high << 16 | low);
    }
  }
}

TEST(SplitFloat, AFineCombOfAllBitPatternsSurvivesSplitAndMerge) {
  // A stride coprime to 2^16 meets every low half many times.
  std::uint64_t lost = 0;
  for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += 97) {
    lost += survives(static_cast<std::uint32_t>(bits)) ? 0 : 1;
  }
  EXPECT_EQ(lost, 0u);
}

TEST(SplitFloat, HighHalfIsTheNearestBf16AndTiesGoAwayFromZero) {
  for (std::uint32_t high = 0; high <= 0xffff; ++high) {
    const bool is_last = (high & 0x7fff) >= 0x7f7f;  // the next one is not finite
    if (is_last) continue;
    ASSERT_EQ(split(from_bits(high << 16 | 0x7fffu)).hi.bits, high);
    ASSERT_EQ(split(from_bits(high << 16 | 0x8000u)).hi.bits, high + 1);
    ASSERT_EQ(split(from_bits(high << 16 | 0x8001u)).hi.bits, high + 1);
  }
}

TEST(SplitFloat, ABf16WithLowHalfZeroIsItself) {
  for (std::uint32_t high = 0; high <= 0xffff; ++high) {
    const bf16 stored{static_cast<std::uint16_t>(high)};
    ASSERT_EQ(bits_of(merge(stored, 0)), bits_of(to_float(stored)));
  }
}

TEST(Bf16, EveryNumberSurvivesDecodingAndEncoding) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const bf16 stored{static_cast<std::uint16_t>(bits)};
    const float value = to_float(stored);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(to_bf16(value))));
    } else {
      ASSERT_EQ(to_bf16(value).bits, bits);
    }
  }
}

TEST(Bf16, RoundsToNearestAndTiesToEven) {
  for (std::uint32_t high = 0; high <= 0xffff; ++high) {
    if ((high & 0x7fff) >= 0x7f80) continue;  // Inf and NaN
    const std::uint32_t even = high + (high & 1);
    ASSERT_EQ(to_bf16(from_bits(high << 16 | 0x7fffu)).bits, high);
    ASSERT_EQ(to_bf16(from_bits(high << 16 | 0x8000u)).bits, even);
    ASSERT_EQ(to_bf16(from_bits(high << 16 | 0x8001u)).bits, high + 1);
  }
}

TEST(Bf16, NanStaysNanWhateverItsPayload) {
  for (const std::uint32_t sign : {0u, 0x80000000u}) {
    for (std::uint32_t payload = 1; payload <= 0x7fffff; payload += 31) {
      ASSERT_TRUE(std::isnan(to_float(to_bf16(from_bits(sign | 0x7f800000u | payload)))));
    }
  }
}

TEST(Bf16, PastTheLargestNumberIsInfinity) {
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-std::numeric_limits<float>::max()).bits, 0xff80);
}

/// IEEE 754-2019, 3.4: sign, 5 exponent bits (bias 15), 10 fraction bits.
double decoded_fp16(std::uint32_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(bits >> 10 & 0x1f);
  const int fraction = static_cast<int>(bits & 0x3ff);
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

TEST(Fp16, EveryNumberIsDecodedAsIeeeSaysAndSurvivesEncoding) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = to_float(fp16{static_cast<std::uint16_t>(bits)});
    const double expected = decoded_fp16(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value));
      ASSERT_TRUE(std::isnan(to_float(to_fp16(value))));
    } else {
      ASSERT_EQ(static_cast<double>(value), expected) << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
      ASSERT_EQ(to_fp16(value).bits, bits);
    }
  }
}

TEST(Fp16, RoundsToNearestAndTiesToEvenAlsoAmongSubnormals) {
  for (const std::uint32_t sign : {0u, 0x8000u}) {
    for (std::uint32_t magnitude = 0; magnitude < 0x7bff; ++magnitude) {
      const std::uint32_t bits = sign | magnitude;
      const float here = static_cast<float>(decoded_fp16(bits));
      const float next = static_cast<float>(decoded_fp16(bits + 1));
      const float middle = (here + next) / 2.0f;  // exact: 12 significant bits
      ASSERT_EQ(to_fp16(std::nextafter(middle, here)).bits, bits);
      ASSERT_EQ(to_fp16(middle).bits, bits + (bits & 1));
      ASSERT_EQ(to_fp16(std::nextafter(middle, next)).bits, bits + 1);
    }
  }
}

TEST(Fp16, OverflowsToInfinityFromTheMiddleBeyondTheLargest) {
  EXPECT_EQ(to_fp16(std::nextafter(65520.0f, 0.0f)).bits, 0x7bff);
  EXPECT_EQ(to_fp16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_fp16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(to_fp16(std::numeric_limits<float>::infinity()).bits, 0x7c00);
}

}  // namespace
}  // namespace layerstream
