#pragma once

#include <cstdint>
#include <optional>

namespace layerstream {

/// The names are Hugging Face's (transformers, trainer_utils.SchedulerType).
enum class SchedulerType : std::uint8_t {
  constant,
  constant_with_warmup,
  linear,
  cosine,
  cosine_with_restarts,
  cosine_with_min_lr,
  polynomial,
  inverse_sqrt,
  warmup_stable_decay
};

/// Of the warm-up and of the decay of warmup_stable_decay; one_minus_sqrt is their "1-sqrt".
enum class LrCurve : std::uint8_t { linear, cosine, one_minus_sqrt };

/// Of polynomial, where lr_end is not given (transformers, get_polynomial_decay_schedule_with_warmup).
inline constexpr double default_lr_end = 1e-7;

/// Hugging Face's lr_scheduler_kwargs, each for some schedules only (see check_config). What is not given
/// has the default of transformers' function of that schedule.
struct LrSchedulerKwargs {
  std::optional<double> num_cycles = {};              ///< waves of the cosine, or restarts
  std::optional<double> power = {};                   ///< of polynomial
  std::optional<double> lr_end = {};                  ///< of polynomial: a learning rate
  std::optional<double> min_lr = {};                  ///< of cosine_with_min_lr: a learning rate
  std::optional<double> min_lr_rate = {};             ///< the same as a part of the peak rate
  std::optional<std::int64_t> timescale = {};         ///< of inverse_sqrt: steps
  std::optional<std::int64_t> num_stable_steps = {};  ///< of warmup_stable_decay, as are those below
  std::optional<std::int64_t> num_decay_steps = {};
  std::optional<double> min_lr_ratio = {};  ///< part of the peak rate at both ends
  std::optional<LrCurve> warmup_type = {};
  std::optional<LrCurve> decay_type = {};

  bool operator==(const LrSchedulerKwargs&) const = default;
};

}  // namespace layerstream
