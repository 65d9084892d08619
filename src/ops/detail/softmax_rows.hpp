#pragma once

#include <cstdint>

/// Vectorised passes over one row of scores, in Google Highway for the instruction set of this build.
/// `T` is float or double. Sums run over lanes, then across them: an order fixed by `count`. A row may be
/// read, though not written, up to one vector past its end.
namespace layerstream::ops::detail {

/// Largest of `count` > 0 numbers; where some are NaN, any.
template <class T>
T row_max(const T* row, std::int64_t count);

/// row[i] = exp(row[i] − shift), within 2 ulp (1 of them highway's); NaN stays NaN. Returns the sum.
/// @pre row[i] − shift <= 80: meant for shifts at or above the largest score.
template <class T>
T row_exp(T* row, std::int64_t count, T shift);

}  // namespace layerstream::ops::detail
