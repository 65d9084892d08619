#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/outliers.hpp"

namespace layerstream {

/// A held-out loss, and the step after which it was measured.
struct EvaluatedStep {
  std::int64_t step = 0;
  double loss = 0.0;

  bool operator==(const EvaluatedStep&) const = default;
};

/// What evaluations have found so far.
struct EvaluationState {
  std::optional<EvaluatedStep> last, best;
  std::optional<EvaluatedStep> best_checkpoint;  ///< of the steps that were saved
  std::int64_t without_gain = 0;                 ///< evaluations since the loss last fell by the threshold
  std::uint64_t data_hash = 0;                   ///< io::Dataset::content_hash of the held-out data
  std::int64_t num_rows = 0;                     ///< of it, from the first on, that are evaluated

  bool operator==(const EvaluationState&) const = default;
};

/// Where a run stands, besides its weights and moments. With these numbers, and the data and the
/// configuration it names, the rest of the run is determined.
struct TrainerState {
  std::int64_t global_step = 0;     ///< steps taken through the data, skipped ones included
  std::int64_t applied_steps = 0;   ///< optimizer updates: AdamW's t
  std::int64_t skipped_in_row = 0;  ///< steps just before that were left out: NaN, Inf or outliers
  std::int64_t tokens_seen = 0;
  // What the data order depends on.
  std::uint64_t seed = 0;
  std::int64_t rows_per_step = 0;
  std::uint64_t data_hash = 0;  ///< io::Dataset::content_hash
  EvaluationState evaluation = {};
  RecentValues recent_losses = {}, recent_grad_norms = {};  ///< where outliers are looked for

  bool operator==(const TrainerState&) const = default;
};

std::string to_json(const TrainerState& state);

/// What to_json wrote. A text without evaluations or recent values, as earlier versions wrote it, has none.
/// Throws FileError with `place` for anything else.
TrainerState trainer_state_from_json(const std::string& text, const std::string& place);

}  // namespace layerstream
