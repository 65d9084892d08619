#pragma once

#include <cstdint>
#include <span>

namespace layerstream {

/// Draws a token from softmax(logits / temperature); temperature 0 takes the largest logit, the first of
/// equals. The draw is the `index`-th of the stream `seed`. Throws Error when a logit is NaN.
std::int32_t sample_token(std::span<const float> logits, double temperature, std::uint64_t seed,
                          std::uint64_t index);

}  // namespace layerstream
