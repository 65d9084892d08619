#pragma once

#include <string_view>
#include <variant>
#include <vector>

#include "profiles/hardware/hardware_profile.hpp"

namespace layerstream {

/// What a key of a profile may hold. Bounds are far outside of any machine, and inside of a slip of units
/// (GB/s or TFLOP/s where bytes/s or FLOP/s are wanted).
struct RateBounds {
  std::string_view unit;
  double least, most;
};
inline constexpr RateBounds bytes_per_second{"bytes/s", 1e6, 1e14};
inline constexpr RateBounds flops_per_second{"FLOP/s", 1e7, 1e17};
inline constexpr RateBounds parameters_per_second{"parameters/s", 1e5, 1e13};
inline constexpr RateBounds memory_bytes{"bytes", 1e6, 1e16};
inline constexpr RateBounds duration_seconds{"s", 1e-9, 1e-1};
inline constexpr RateBounds core_count{"cores", 1.0, 1e5};
inline constexpr RateBounds thread_block_count{"thread blocks", 1.0, 65535.0};
inline constexpr RateBounds speed_ratio{"times", 1.0, 3.0};
inline constexpr RateBounds curve_tokens{"tokens", 1.0, 1e10};

/// One key. The list of these is the only description of the file: reader and writer go through it.
struct ProfileKey {
  using Text = std::string* (*)(HardwareProfile&);
  using Flag = bool* (*)(HardwareProfile&);
  struct Number {
    Rate* (*target)(HardwareProfile&);
    RateBounds bounds;
  };
  struct Curve {
    RateCurve* (*target)(HardwareProfile&);
    RateBounds bounds;
    std::string_view size_key;  ///< "tokens", "row_tokens"
  };

  std::string_view section;  ///< empty: top level
  std::string_view key;
  std::variant<Text, Flag, Number, Curve> holds;
};

/// All keys, in the order of the file; keys of a section follow each other.
std::vector<ProfileKey> profile_schema();

}  // namespace layerstream
