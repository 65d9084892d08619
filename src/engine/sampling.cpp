#include "engine/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "core/random.hpp"

namespace layerstream {

std::int32_t sample_token(std::span<const float> logits, double temperature, std::uint64_t seed,
                          std::uint64_t index) {
  LAYERSTREAM_EXPECT(!logits.empty(), "no logits");
  if (std::any_of(logits.begin(), logits.end(), [](float logit) { return std::isnan(logit); })) {
    throw Error("the model's logits are NaN: its weights are damaged or were trained past a divergence");
  }
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (temperature == 0.0) return static_cast<std::int32_t>(largest - logits.begin());
  std::vector<double> cumulative(logits.size());
  double sum = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    sum += std::exp((static_cast<double>(logits[i]) - static_cast<double>(*largest)) / temperature);
    cumulative[i] = sum;
  }
  constexpr std::uint64_t sampling_stream =
      0x73616d706c65;  // "sample": apart from the streams of weights and data
  const double threshold = uniform_at(seed, sampling_stream, index) * sum;
  const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end(), threshold);
  return static_cast<std::int32_t>(
      std::min<std::ptrdiff_t>(chosen - cumulative.begin(), static_cast<std::ptrdiff_t>(logits.size()) - 1));
}

}  // namespace layerstream
