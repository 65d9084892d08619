#pragma once

#include <cstdint>

#include "ops/detail/dispatch.hpp"

namespace layerstream::ops::detail {

/// The parts of a transform as pointers; nullptr leaves a part out.
template <class T>
struct HeadParts {
  using A = MathOf<T>;
  const A* bias;                  // (H, d)
  const A* norm_weight;           // (d)
  const A* cos;                   // (P, d / 2)
  const A* sin;                   // (P, d / 2)
  const std::int32_t* positions;  // (T)
  A eps;
};

/// out[t, h, :] = transform of raw[t, h, :], see ops/heads.hpp.
template <class T>
struct HeadForward {
  T* out;        // (T, H, d)
  const T* raw;  // (T, row_stride), from this group's first column
  std::int64_t row_stride, tokens, heads, head_dim;
  HeadParts<T> parts;
};

/// Writes draw and adds to dbias and dnorm_weight.
template <class T>
struct HeadBackward {
  using A = MathOf<T>;
  T* draw;             // (T, draw_stride), from this group's first column
  const void* dout;    // (T, H, d) of T, or of A if has_wide_dout
  const T* raw;        // (T, raw_stride), from this group's first column; read only with a norm
  bool has_wide_dout;  // as may be if A is not T
  std::int64_t draw_stride, raw_stride, tokens, heads, head_dim;
  HeadParts<T> parts;
  A* dbias;         // (H, d); nullptr without a bias
  A* dnorm_weight;  // (d); nullptr without a norm
};

}  // namespace layerstream::ops::detail
