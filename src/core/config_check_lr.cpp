#include <cmath>

#include "core/config_namer.hpp"

namespace layerstream {
namespace {

/// The keys of lr_scheduler_kwargs, and the schedules that use them.
std::vector<OwnedKey> lr_scheduler_keys() {
  return {{"lr_scheduler_kwargs.num_cycles",
           {"cosine", "cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay"}},
          {"lr_scheduler_kwargs.power", {"polynomial"}},
          {"lr_scheduler_kwargs.lr_end", {"polynomial"}},
          {"lr_scheduler_kwargs.min_lr", {"cosine_with_min_lr"}},
          {"lr_scheduler_kwargs.min_lr_rate", {"cosine_with_min_lr"}},
          {"lr_scheduler_kwargs.timescale", {"inverse_sqrt"}},
          {"lr_scheduler_kwargs.num_stable_steps", {"warmup_stable_decay"}},
          {"lr_scheduler_kwargs.num_decay_steps", {"warmup_stable_decay"}},
          {"lr_scheduler_kwargs.min_lr_ratio", {"warmup_stable_decay"}},
          {"lr_scheduler_kwargs.warmup_type", {"warmup_stable_decay"}},
          {"lr_scheduler_kwargs.decay_type", {"warmup_stable_decay"}}};
}

/// transformers divides what is below the peak rate by it, so there must be something above.
void check_below_peak(std::string_view key, double rate, const RunConfig& run, const Namer& name,
                      ConfigProblems& problems) {
  if (rate < run.learning_rate) return;
  problems.add("{} with {} must be below {}; lower the one or raise the other", name(key),
               name("lr_scheduler_type"), name("learning_rate"));
}

}  // namespace

void check_lr_scheduler(const RunConfig& run, const Namer& name, ConfigProblems& problems) {
  check_owners("lr_scheduler_type", lr_scheduler_keys(), name, problems);
  const LrSchedulerKwargs& kwargs = run.lr_scheduler_kwargs;
  switch (run.lr_scheduler_type) {
    case SchedulerType::cosine_with_restarts:
      if (kwargs.num_cycles && *kwargs.num_cycles != std::floor(*kwargs.num_cycles)) {
        problems.add("{} with {} must be a whole number: the times that the rate falls",
                     name("lr_scheduler_kwargs.num_cycles"), name("lr_scheduler_type"));
      }
      return;
    case SchedulerType::cosine_with_min_lr:
      if (kwargs.min_lr.has_value() == kwargs.min_lr_rate.has_value()) {
        problems.add("{} needs one of {} and {}; set one", name("lr_scheduler_type"),
                     name("lr_scheduler_kwargs.min_lr"), name("lr_scheduler_kwargs.min_lr_rate"));
      }
      if (kwargs.min_lr) {
        check_below_peak("lr_scheduler_kwargs.min_lr", *kwargs.min_lr, run, name, problems);
      }
      return;
    case SchedulerType::polynomial:
      check_below_peak("lr_scheduler_kwargs.lr_end", kwargs.lr_end.value_or(default_lr_end), run, name,
                       problems);
      return;
    case SchedulerType::warmup_stable_decay:
      if (!kwargs.num_decay_steps) {
        problems.add("{} needs lr_scheduler_kwargs.num_decay_steps: the steps of its decay",
                     name("lr_scheduler_type"));
      }
      if (kwargs.num_cycles && kwargs.decay_type.value_or(LrCurve::cosine) != LrCurve::cosine) {
        problems.add("{} means nothing with {}; drop it, or set lr_scheduler_kwargs.decay_type: cosine",
                     name("lr_scheduler_kwargs.num_cycles"), name("lr_scheduler_kwargs.decay_type"));
      }
      return;
    default:
      return;
  }
}

}  // namespace layerstream
