#pragma once

#include <cstdint>
#include <vector>

namespace layerstream::io {

/// The rows of one optimizer step.
struct StepRows {
  std::int64_t epoch;          ///< from 0
  std::int64_t step_in_epoch;  ///< from 0
  std::vector<std::int64_t> rows;
};

/// The order in which rows are visited, as a pure function of (num_rows, rows_per_step, seed): nothing to
/// save in a checkpoint, and a resumed run visits what the uninterrupted one would have.
///
/// Each epoch visits every row once, in a random order of its own; its last step is smaller when
/// rows_per_step does not divide num_rows (7 rows by 4: steps of 4 and 3). Not thread-safe.
class DataOrder {
 public:
  /// Throws ConfigError unless num_rows >= 1 and rows_per_step >= 1.
  DataOrder(std::int64_t num_rows, std::int64_t rows_per_step, std::uint64_t seed, bool shuffle = true);

  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t steps_per_epoch() const { return (num_rows_ - 1) / rows_per_step_ + 1; }

  /// @param step global, from 0, in any order; asking for another epoch costs O(num_rows).
  StepRows step(std::int64_t step);

 private:
  void prepare(std::int64_t epoch);

  std::int64_t num_rows_;
  std::int64_t rows_per_step_;
  std::uint64_t seed_;
  bool shuffle_;
  std::int64_t prepared_epoch_ = -1;
  std::vector<std::int64_t> permutation_;  // of prepared_epoch_; unused without shuffle
};

}  // namespace layerstream::io
