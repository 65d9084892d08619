#include "io/sampler.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.hpp"
#include "core/random.hpp"

namespace layerstream::io {

namespace {

/// Random integers of one epoch.
class EpochRandom {
 public:
  EpochRandom(std::uint64_t seed, std::int64_t epoch)
      : seed_(seed), stream_(stream_base + static_cast<std::uint64_t>(epoch)) {}

  /// Uniform in [0, bound), unbiased: Lemire, "Fast random integer generation in an interval", TOMACS 2019,
  /// algorithm 5.
  std::uint64_t below(std::uint64_t bound) {
    __extension__ using uint128 = unsigned __int128;
    uint128 product = static_cast<uint128>(next()) * bound;
    if (static_cast<std::uint64_t>(product) < bound) {
      const std::uint64_t threshold = (0 - bound) % bound;
      while (static_cast<std::uint64_t>(product) < threshold) product = static_cast<uint128>(next()) * bound;
    }
    return static_cast<std::uint64_t>(product >> 64);
  }

 private:
  /// Keeps the data order apart from other users of the run's seed ("data" in ASCII, upper half).
  static constexpr std::uint64_t stream_base = std::uint64_t{0x64617461} << 32;

  std::uint64_t next() {
    const auto word = philox(seed_, draw_++, stream_);
    return (static_cast<std::uint64_t>(word[0]) << 32) | word[1];
  }

  std::uint64_t seed_;
  std::uint64_t stream_;
  std::uint64_t draw_ = 0;
};

}  // namespace

DataOrder::DataOrder(std::int64_t num_rows, std::int64_t rows_per_step, std::uint64_t seed, bool shuffle)
    : num_rows_(num_rows), rows_per_step_(rows_per_step), seed_(seed), shuffle_(shuffle) {
  if (num_rows < 1) throw ConfigError("train_file: there is no row of training data");
  if (rows_per_step < 1) {
    throw ConfigError(fmt::format(
        "per_device_train_batch_size x gradient_accumulation_steps: {} rows per step; at least 1 is needed",
        rows_per_step));
  }
}

StepRows DataOrder::step(std::int64_t step) {
  LAYERSTREAM_EXPECT(step >= 0, "step {}", step);
  StepRows result{step / steps_per_epoch(), step % steps_per_epoch(), {}};
  const std::int64_t begin = result.step_in_epoch * rows_per_step_;
  const std::int64_t count = std::min(rows_per_step_, num_rows_ - begin);
  if (shuffle_) {
    prepare(result.epoch);
    result.rows.assign(permutation_.begin() + begin, permutation_.begin() + begin + count);
  } else {
    result.rows.resize(static_cast<std::size_t>(count));
    std::iota(result.rows.begin(), result.rows.end(), begin);
  }
  return result;
}

void DataOrder::prepare(std::int64_t epoch) {
  if (epoch == prepared_epoch_) return;
  permutation_.resize(static_cast<std::size_t>(num_rows_));
  std::iota(permutation_.begin(), permutation_.end(), 0);
  EpochRandom random(seed_, epoch);
  // Fisher-Yates: Knuth, TAOCP volume 2, algorithm P.
  for (std::size_t i = permutation_.size(); i > 1; --i) {
    std::swap(permutation_[i - 1], permutation_[random.below(i)]);
  }
  prepared_epoch_ = epoch;
}

}  // namespace layerstream::io
