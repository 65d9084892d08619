#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "core/log.hpp"
#include "core/run_config.hpp"
#include "engine/parameter_store.hpp"
#include "engine/trainer_state.hpp"
#include "io/checkpoint.hpp"

namespace layerstream {

/// How long a run is.
struct RunLength {
  std::int64_t total_steps = 0;
  std::int64_t steps_per_epoch = 0;
};

/// The checkpoints in a run's output_dir: which may be there when it begins, when one is due, what goes into
/// it and which stay.
class CheckpointKeeper {
 public:
  /// @param run what it says at the time of a call counts. @param config_json the model's. Both outlive the
  /// keeper.
  CheckpointKeeper(const RunConfig& run, const std::string& config_json, const Log& log,
                   std::shared_ptr<io::FileSystem> files = std::make_shared<io::FileSystem>());

  /// Of a run that begins anew: throws ConfigError if there are checkpoints of another.
  void check_there_is_none() const;
  /// Of a run that goes on at `step`: throws ConfigError if there is a later one, which a later resume would
  /// take.
  void check_there_is_none_after(std::int64_t step) const;
  /// Of a run that goes on: forgets, with a warning, a best checkpoint that is not there, as it is of another
  /// output_dir, or was removed.
  void forget_absent_best(EvaluationState& evaluation) const;
  /// Throws ResourceError unless there is room for the checkpoints still to come. @pre the run goes on
  /// @param checkpoint_bytes of each
  void check_disk_space(const TrainerState& state, const RunLength& length,
                        std::uint64_t checkpoint_bytes) const;

  /// Whether save_strategy wants one of the state, besides that of the end.
  bool is_due(const TrainerState& state, std::int64_t steps_per_epoch) const;
  /// Writes one, which may be the best: then it is noted in the state. Then removes what save_total_limit
  /// leaves no room for. Throws Error if it cannot be written; earlier ones are as they were then.
  std::filesystem::path save(const ParameterStore& store, TrainerState& state) const;

 private:
  io::Retention retention(const TrainerState& state) const;
  void tidy(const TrainerState& state) const;

  const RunConfig& run_;
  const std::string& config_json_;
  Log log_;
  std::shared_ptr<io::FileSystem> files_;
};

}  // namespace layerstream
