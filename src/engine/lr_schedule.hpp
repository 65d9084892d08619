#pragma once

#include <cstdint>

#include "core/run_config.hpp"

namespace layerstream {

/// Learning rate of each optimizer step, as Hugging Face transformers computes it
/// (optimization.py: get_constant_schedule_with_warmup, get_linear_schedule_with_warmup,
/// get_cosine_schedule_with_warmup with half a cycle).
///
/// The warm-up rises linearly from 0 at step 0. Unlike `lr_scheduler_type: constant` there, a constant
/// rate here has a warm-up too if one is asked for.
class LrSchedule {
 public:
  /// @param total_steps steps of the whole run, resumed or not.
  LrSchedule(SchedulerType type, double learning_rate, std::int64_t warmup_steps, std::int64_t total_steps);

  /// The schedule of a run: warmup_steps if above 0, else ceil(warmup_ratio · total_steps).
  static LrSchedule of(const RunConfig& run, std::int64_t total_steps);

  /// @param step from 0: the number of optimizer steps already done.
  double at(std::int64_t step) const;

  std::int64_t warmup_steps() const { return warmup_steps_; }

 private:
  SchedulerType type_;
  double learning_rate_;
  std::int64_t warmup_steps_;
  std::int64_t total_steps_;
};

}  // namespace layerstream
