#include "engine/lr_schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.hpp"

namespace layerstream {
namespace {

double as_double(std::int64_t steps) {
  return static_cast<double>(steps);
}

/// From 1 at progress 0; half a cycle ends at 0.
double cosine(double num_cycles, double progress) {
  return 0.5 * (1.0 + std::cos(std::numbers::pi * num_cycles * 2.0 * progress));
}

/// `factor` in [0, 1] to [min, 1].
double raised(double factor, double min) {
  return std::max(0.0, factor * (1.0 - min) + min);
}

double rise(LrCurve curve, double progress) {
  switch (curve) {
    case LrCurve::linear:
      return progress;
    case LrCurve::cosine:
      return 0.5 * (1.0 - std::cos(std::numbers::pi * progress));
    case LrCurve::one_minus_sqrt:
      return 1.0 - std::sqrt(1.0 - progress);
  }
  throw ContractError("LrSchedule: unknown warm-up");
}

double fall(LrCurve curve, double num_cycles, double progress) {
  switch (curve) {
    case LrCurve::linear:
      return 1.0 - progress;
    case LrCurve::cosine:
      return cosine(num_cycles, progress);
    case LrCurve::one_minus_sqrt:
      return 1.0 - std::sqrt(progress);
  }
  throw ContractError("LrSchedule: unknown decay");
}

constexpr double half_a_cycle = 0.5;

}  // namespace

LrSchedule::LrSchedule(SchedulerType type, double learning_rate, std::int64_t warmup_steps,
                       std::int64_t total_steps, const LrSchedulerKwargs& kwargs)
    : type_(type),
      learning_rate_(learning_rate),
      warmup_steps_(warmup_steps),
      total_steps_(total_steps),
      kwargs_(kwargs) {
  LAYERSTREAM_EXPECT(warmup_steps >= 0 && total_steps >= 0, "{} warm-up steps of {}", warmup_steps,
                     total_steps);
  LAYERSTREAM_EXPECT(type != SchedulerType::cosine_with_min_lr || kwargs.min_lr || kwargs.min_lr_rate,
                     "cosine_with_min_lr with neither min_lr nor min_lr_rate");
  LAYERSTREAM_EXPECT(type != SchedulerType::warmup_stable_decay || kwargs.num_decay_steps,
                     "warmup_stable_decay without num_decay_steps");
}

LrSchedule LrSchedule::of(const RunConfig& run, std::int64_t total_steps) {
  const double part = std::ceil(run.warmup_ratio * static_cast<double>(total_steps));
  const std::int64_t warmup = run.warmup_steps > 0 ? run.warmup_steps : static_cast<std::int64_t>(part);
  const LrSchedulerKwargs& kwargs = run.lr_scheduler_kwargs;
  // Without num_stable_steps the stable steps are what the two others leave.
  if (run.lr_scheduler_type == SchedulerType::warmup_stable_decay && !kwargs.num_stable_steps &&
      warmup + kwargs.num_decay_steps.value_or(0) > total_steps) {
    throw ConfigError(fmt::format(
        "lr_scheduler_type = warmup_stable_decay: {} steps of warm-up and {} of decay do not fit in the "
        "{} steps of the run; lower warmup_steps (warmup_ratio) or lr_scheduler_kwargs.num_decay_steps, or "
        "set lr_scheduler_kwargs.num_stable_steps to stop before the decay ends",
        warmup, kwargs.num_decay_steps.value_or(0), total_steps));
  }
  return {run.lr_scheduler_type, run.learning_rate, warmup, total_steps, kwargs};
}

double LrSchedule::at(std::int64_t step) const {
  LAYERSTREAM_EXPECT(step >= 0, "learning rate of step {}", step);
  return learning_rate_ * factor(step);
}

double LrSchedule::factor(std::int64_t step) const {
  if (step >= warmup_steps_) return decay_factor(step);
  const double part = as_double(step) / as_double(warmup_steps_);
  if (type_ != SchedulerType::warmup_stable_decay) return part;
  return raised(rise(kwargs_.warmup_type.value_or(LrCurve::linear), part), kwargs_.min_lr_ratio.value_or(0));
}

double LrSchedule::progress(std::int64_t step) const {
  return as_double(step - warmup_steps_) / as_double(std::max<std::int64_t>(1, total_steps_ - warmup_steps_));
}

double LrSchedule::decay_factor(std::int64_t step) const {
  switch (type_) {
    case SchedulerType::constant:
    case SchedulerType::constant_with_warmup:
      return 1.0;
    case SchedulerType::linear: {
      const std::int64_t decay_steps = std::max<std::int64_t>(1, total_steps_ - warmup_steps_);
      return std::max(0.0, as_double(total_steps_ - step) / as_double(decay_steps));
    }
    case SchedulerType::cosine:
      return std::max(0.0, cosine(kwargs_.num_cycles.value_or(half_a_cycle), progress(step)));
    case SchedulerType::cosine_with_restarts: {
      const double done = progress(step);
      if (done >= 1.0) return 0.0;
      return std::max(0.0, cosine(half_a_cycle, std::fmod(kwargs_.num_cycles.value_or(1.0) * done, 1.0)));
    }
    case SchedulerType::cosine_with_min_lr:
      return raised(cosine(kwargs_.num_cycles.value_or(half_a_cycle), progress(step)),
                    kwargs_.min_lr ? *kwargs_.min_lr / learning_rate_ : *kwargs_.min_lr_rate);
    case SchedulerType::polynomial:
      return polynomial_factor(step);
    case SchedulerType::inverse_sqrt:
      return inverse_sqrt_factor(step);
    case SchedulerType::warmup_stable_decay:
      return stable_decay_factor(step);
  }
  throw ContractError("LrSchedule: unknown type");
}

double LrSchedule::polynomial_factor(std::int64_t step) const {
  const double lr_end = kwargs_.lr_end.value_or(default_lr_end);
  // Theirs would divide by zero at a last step that is also the last of the warm-up.
  if (step > total_steps_ || total_steps_ <= warmup_steps_) return lr_end / learning_rate_;
  const double remaining = 1.0 - progress(step);
  const double decayed =
      (learning_rate_ - lr_end) * std::pow(remaining, kwargs_.power.value_or(1.0)) + lr_end;
  return decayed / learning_rate_;
}

double LrSchedule::inverse_sqrt_factor(std::int64_t step) const {
  const std::int64_t default_timescale = warmup_steps_ > 0 ? warmup_steps_ : 10'000;
  const std::int64_t timescale = kwargs_.timescale.value_or(default_timescale);
  const std::int64_t shift = timescale - warmup_steps_;
  return 1.0 / std::sqrt(as_double(step + shift) / as_double(timescale));
}

double LrSchedule::stable_decay_factor(std::int64_t step) const {
  const double min_lr_ratio = kwargs_.min_lr_ratio.value_or(0);
  const std::int64_t decay_steps = *kwargs_.num_decay_steps;
  const std::int64_t stable_steps =
      kwargs_.num_stable_steps.value_or(total_steps_ - warmup_steps_ - decay_steps);
  const std::int64_t decay_step = step - warmup_steps_ - stable_steps;
  if (decay_step < 0) return 1.0;
  if (decay_step >= decay_steps) return min_lr_ratio;
  const double done = as_double(decay_step) / as_double(decay_steps);
  return raised(
      fall(kwargs_.decay_type.value_or(LrCurve::cosine), kwargs_.num_cycles.value_or(half_a_cycle), done),
      min_lr_ratio);
}

}  // namespace layerstream
