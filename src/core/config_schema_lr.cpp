#include "core/config_fields.hpp"

namespace layerstream {
namespace {

template <class T>
auto kwarg(std::optional<T> LrSchedulerKwargs::*member) {
  return config_field::within(&RunConfig::lr_scheduler_kwargs, member);
}

}  // namespace

std::vector<ConfigField> lr_scheduler_fields(std::string_view section) {
  using namespace config_field;
  using K = LrSchedulerKwargs;
  static constexpr std::string_view required = "not given";
  const std::vector<std::pair<std::string_view, LrCurve>> curves = {
      {"linear", LrCurve::linear}, {"cosine", LrCurve::cosine}, {"1-sqrt", LrCurve::one_minus_sqrt}};
  return {
      or_null(kwarg(&K::num_cycles), "0.5, of cosine_with_restarts 1",
              real({section,
                    "lr_scheduler_kwargs.num_cycles",
                    "cosine, cosine_with_min_lr, warmup_stable_decay: waves of the cosine; "
                    "cosine_with_restarts: times it falls, a whole number",
                    {"num_cycles"}},
                   kwarg(&K::num_cycles), {0.0, false})),
      or_null(kwarg(&K::power), "1",
              real({section, "lr_scheduler_kwargs.power", "polynomial: exponent of the decay", {"power"}},
                   kwarg(&K::power), {0.0, false})),
      or_null(kwarg(&K::lr_end), "1e-7",
              real({section,
                    "lr_scheduler_kwargs.lr_end",
                    "polynomial: rate at the end, below learning_rate",
                    {"lr_end", "end_learning_rate"}},
                   kwarg(&K::lr_end), {0.0, true})),
      or_null(kwarg(&K::min_lr), required,
              real({section,
                    "lr_scheduler_kwargs.min_lr",
                    "cosine_with_min_lr: lowest rate, below learning_rate; this or min_lr_rate is needed",
                    {"min_lr"}},
                   kwarg(&K::min_lr), {0.0, true})),
      or_null(kwarg(&K::min_lr_rate), required,
              real({section,
                    "lr_scheduler_kwargs.min_lr_rate",
                    "cosine_with_min_lr: lowest rate as a part of learning_rate",
                    {"min_lr_rate"}},
                   kwarg(&K::min_lr_rate), {0.0, true, 1.0})),
      or_null(
          kwarg(&K::timescale), "the warm-up's steps, 10000 if it has none",
          integer(
              {section,
               "lr_scheduler_kwargs.timescale",
               "inverse_sqrt: steps s; t steps after the warm-up the rate is learning_rate / sqrt(1 + t/s)",
               {"timescale"}},
              kwarg(&K::timescale), {.min = 1})),
      or_null(kwarg(&K::num_stable_steps), "what warm-up and decay leave",
              integer({section,
                       "lr_scheduler_kwargs.num_stable_steps",
                       "warmup_stable_decay: steps at learning_rate",
                       {"num_stable_steps", "stable_steps"}},
                      kwarg(&K::num_stable_steps), {.min = 0})),
      or_null(kwarg(&K::num_decay_steps), required,
              integer({section,
                       "lr_scheduler_kwargs.num_decay_steps",
                       "warmup_stable_decay: steps of the decay; needed",
                       {"num_decay_steps", "decay_steps", "lr_decay_steps"}},
                      kwarg(&K::num_decay_steps), {.min = 0})),
      or_null(kwarg(&K::min_lr_ratio), "0",
              real({section,
                    "lr_scheduler_kwargs.min_lr_ratio",
                    "warmup_stable_decay: rate at the start and after the decay as a part of learning_rate",
                    {"min_lr_ratio"}},
                   kwarg(&K::min_lr_ratio), {0.0, true, 1.0})),
      or_null(kwarg(&K::warmup_type), "linear",
              choice<LrCurve>({section,
                               "lr_scheduler_kwargs.warmup_type",
                               "warmup_stable_decay: curve of the warm-up",
                               {"warmup_type"}},
                              kwarg(&K::warmup_type), curves)),
      or_null(kwarg(&K::decay_type), "cosine",
              choice<LrCurve>({section,
                               "lr_scheduler_kwargs.decay_type",
                               "warmup_stable_decay: curve of the decay",
                               {"decay_type", "lr_decay_style"}},
                              kwarg(&K::decay_type), curves)),
  };
}

}  // namespace layerstream
