#pragma once

#include <cstdint>

#include "core/lr_scheduler.hpp"
#include "core/run_config.hpp"

namespace layerstream {

/// Learning rate of each optimizer step, as Hugging Face transformers computes it (optimization.py: the
/// get_..._schedule functions, whose operations in double are repeated here in their order).
///
/// The warm-up rises linearly from 0 at step 0; that of warmup_stable_decay from min_lr_ratio, along
/// warmup_type. Unlike `lr_scheduler_type: constant` there, a constant rate here has a warm-up too if one
/// is asked for, and is constant_with_warmup.
class LrSchedule {
 public:
  /// @param total_steps steps of the whole run, resumed or not.
  /// @pre the type's required kwargs are given, and the others in their ranges (check_config)
  LrSchedule(SchedulerType type, double learning_rate, std::int64_t warmup_steps, std::int64_t total_steps,
             const LrSchedulerKwargs& kwargs = {});

  /// The schedule of a run: warmup_steps if above 0, else ceil(warmup_ratio · total_steps). Throws
  /// ConfigError for a warmup_stable_decay whose warm-up and decay leave no room in the run.
  static LrSchedule of(const RunConfig& run, std::int64_t total_steps);

  /// @param step from 0: the number of optimizer steps already done.
  double at(std::int64_t step) const;

  std::int64_t warmup_steps() const { return warmup_steps_; }

 private:
  /// Rate at `step` as a part of learning_rate.
  double factor(std::int64_t step) const;
  /// The same, from the end of the warm-up on.
  double decay_factor(std::int64_t step) const;
  /// From 0 at the end of the warm-up to 1 at the end of the run, and on.
  double progress(std::int64_t step) const;

  double polynomial_factor(std::int64_t step) const;
  double inverse_sqrt_factor(std::int64_t step) const;
  double stable_decay_factor(std::int64_t step) const;

  SchedulerType type_;
  double learning_rate_;
  std::int64_t warmup_steps_;
  std::int64_t total_steps_;
  LrSchedulerKwargs kwargs_;
};

}  // namespace layerstream
