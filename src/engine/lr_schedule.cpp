#include "engine/lr_schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.hpp"

namespace layerstream {

LrSchedule::LrSchedule(SchedulerType type, double learning_rate, std::int64_t warmup_steps,
                       std::int64_t total_steps)
    : type_(type), learning_rate_(learning_rate), warmup_steps_(warmup_steps), total_steps_(total_steps) {
  LAYERSTREAM_EXPECT(warmup_steps >= 0 && total_steps >= 0, "{} warm-up steps of {}", warmup_steps,
                     total_steps);
}

LrSchedule LrSchedule::of(const RunConfig& run, std::int64_t total_steps) {
  const double part = std::ceil(run.warmup_ratio * static_cast<double>(total_steps));
  const std::int64_t warmup = run.warmup_steps > 0 ? run.warmup_steps : static_cast<std::int64_t>(part);
  return {run.lr_scheduler_type, run.learning_rate, warmup, total_steps};
}

double LrSchedule::at(std::int64_t step) const {
  LAYERSTREAM_EXPECT(step >= 0, "learning rate of step {}", step);
  if (step < warmup_steps_) {
    return learning_rate_ * (static_cast<double>(step) / static_cast<double>(warmup_steps_));
  }
  const auto decay_steps = static_cast<double>(std::max<std::int64_t>(1, total_steps_ - warmup_steps_));
  switch (type_) {
    case SchedulerType::constant:
      return learning_rate_;
    case SchedulerType::linear:
      return learning_rate_ * std::max(0.0, static_cast<double>(total_steps_ - step) / decay_steps);
    case SchedulerType::cosine: {
      const double progress = static_cast<double>(step - warmup_steps_) / decay_steps;
      return learning_rate_ * std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * progress)));
    }
  }
  throw ContractError("LrSchedule: unknown type");
}

}  // namespace layerstream
