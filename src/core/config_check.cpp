#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/config.hpp"
#include "core/config_problems.hpp"
#include "core/config_schema.hpp"

namespace layerstream {
namespace {

/// Names keys as "key = value (place)".
class Namer {
 public:
  Namer(const RunConfig& run, const ConfigOrigins& origins)
      : run_(run), origins_(origins), schema_(config_schema()) {}

  const std::vector<ConfigField>& schema() const { return schema_; }

  std::string operator()(std::string_view key) const {
    const auto origin = origins_.find(key);
    return fmt::format("{} = {} ({})", key, value(key),
                       origin == origins_.end() ? "default" : origin->second);
  }

  /// As YAML.
  std::string value(std::string_view key) const {
    const auto field = std::ranges::find(schema_, key, &ConfigField::key);
    LAYERSTREAM_EXPECT(field != schema_.end(), "no configuration key {}", key);
    return field->show(run_);
  }

 private:
  const RunConfig& run_;
  const ConfigOrigins& origins_;
  std::vector<ConfigField> schema_;
};

/// A key that belongs to some attention patterns.
struct AttentionKey {
  std::string_view name;
  std::int64_t value;
  bool with_window, with_blocks;
  bool required;  ///< by those
};

void check_attention(const RunConfig& run, const Namer& name, ConfigProblems& problems) {
  const bool is_window = run.attention_pattern == AttentionPatternType::window;
  const bool is_blocks = run.attention_pattern == AttentionPatternType::blocks;
  bool complete = is_window || is_blocks;
  for (const AttentionKey& key :
       {AttentionKey{"attention_window", run.attention_window, true, false, true},
        AttentionKey{"attention_block", run.attention_block, false, true, true},
        AttentionKey{"attention_local_blocks", run.attention_local_blocks, false, true, true},
        AttentionKey{"attention_global_tokens", run.attention_global_tokens, true, true, false}}) {
    const bool belongs = (is_window && key.with_window) || (is_blocks && key.with_blocks);
    if (!belongs && key.value != 0) {
      problems.add("{} means nothing with {}; drop it, or set attention_pattern: {}", name(key.name),
                   name("attention_pattern"),
                   !key.with_blocks ? "window" : (key.with_window ? "window or blocks" : "blocks"));
    }
    if (belongs && key.required && key.value <= 0) {
      problems.add("{} needs {} of 1 or more, and has {}", name("attention_pattern"), key.name,
                   name(key.name));
      complete = false;
    }
  }
  if (!complete || run.attention_global_tokens < 0) return;
  const std::int64_t dense = attention_pattern_of(run).dense_tokens();
  if (dense < run.cutoff_len) return;
  const std::string span =
      is_window ? fmt::format("{} and {}", name("attention_window"), name("attention_global_tokens"))
                : fmt::format("{}, {} and {}", name("attention_block"), name("attention_local_blocks"),
                              name("attention_global_tokens"));
  problems.add(
      "{} is full attention here: {} leave out no key of the first {} tokens of a document, and {}; set "
      "attention_pattern: full, or lower what is too large",
      name("attention_pattern"), span, dense, name("cutoff_len"));
}

/// A key of lr_scheduler_kwargs, and the schedules that use it.
struct LrSchedulerKey {
  std::string_view name;
  std::vector<std::string_view> schedules;
};

std::vector<LrSchedulerKey> lr_scheduler_keys() {
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

void check_lr_scheduler_owners(const Namer& name, ConfigProblems& problems) {
  for (const LrSchedulerKey& key : lr_scheduler_keys()) {
    const bool given = name.value(key.name) != "null";
    const bool used =
        std::ranges::find(key.schedules, name.value("lr_scheduler_type")) != key.schedules.end();
    if (!given || used) continue;
    problems.add("{} means nothing with {}; drop it, or set lr_scheduler_type: {}", name(key.name),
                 name("lr_scheduler_type"), fmt::join(key.schedules, " or "));
  }
}

/// transformers divides what is below the peak rate by it, so there must be something above.
void check_below_peak(std::string_view key, double rate, const RunConfig& run, const Namer& name,
                      ConfigProblems& problems) {
  if (rate < run.learning_rate) return;
  problems.add("{} with {} must be below {}; lower the one or raise the other", name(key),
               name("lr_scheduler_type"), name("learning_rate"));
}

void check_lr_scheduler(const RunConfig& run, const Namer& name, ConfigProblems& problems) {
  check_lr_scheduler_owners(name, problems);
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

bool tokens_of_a_step_overflow(const RunConfig& run) {
  std::int64_t rows = 0;
  std::int64_t tokens = 0;
  return __builtin_mul_overflow(run.per_device_train_batch_size, run.gradient_accumulation_steps, &rows) ||
         __builtin_mul_overflow(rows, run.cutoff_len, &tokens);
}

}  // namespace

void check_config(const RunConfig& run, const ConfigOrigins& origins) {
  const Namer name(run, origins);
  ConfigProblems problems;
  for (const ConfigField& field : name.schema()) {
    if (!field.in_range(run)) problems.add("{} is refused; allowed: {}", name(field.key), field.allowed);
  }
  if (run.model_name_or_path.empty() && run.config_name.empty()) {
    problems.add(
        "no model: set model_name_or_path to a Hugging Face model directory, or config_name to a "
        "config.json to train from scratch");
  }
  if (!run.model_name_or_path.empty() && !run.config_name.empty()) {
    problems.add(
        "{} and {} exclude each other: the first continues from weights, the second trains from scratch",
        name("model_name_or_path"), name("config_name"));
  }
  if (run.max_steps <= 0 && run.num_train_epochs == 0) {
    problems.add("nothing to train: {} and {}; set one of them above 0", name("max_steps"),
                 name("num_train_epochs"));
  }
  if (run.optimizer_update == OptimizerUpdate::immediate && run.max_grad_norm != 0) {
    problems.add(
        "{} needs max_grad_norm: 0, as the norm is known only after the last gradient, and {}; set "
        "max_grad_norm: 0 or optimizer_update: deferred",
        name("optimizer_update"), name("max_grad_norm"));
  }
  if (run.allow_emulation && run.backend == BackendChoice::explicit_copies) {
    problems.add("{} means nothing with {}; drop it, or set backend: coherent", name("allow_emulation"),
                 name("backend"));
  }
  if (run.resume_from_checkpoint == "auto" && run.output_dir.empty()) {
    problems.add("{} looks for checkpoints in output_dir, which is not set", name("resume_from_checkpoint"));
  }
  check_attention(run, name, problems);
  check_lr_scheduler(run, name, problems);
  if (tokens_of_a_step_overflow(run)) {
    problems.add("{} x {} x {} tokens of a step overflow 64 bits", name("per_device_train_batch_size"),
                 name("gradient_accumulation_steps"), name("cutoff_len"));
  }
  problems.throw_if_any("configuration");
}

void check_config(const LoadedConfig& config) {
  check_config(config.run, config.origins);
}

void require_keys(const LoadedConfig& config, std::initializer_list<std::string_view> keys,
                  std::string_view needed_by) {
  const std::vector<ConfigField> schema = config_schema();
  const RunConfig defaults;
  ConfigProblems problems;
  for (const std::string_view key : keys) {
    const auto field = std::ranges::find(schema, key, &ConfigField::key);
    LAYERSTREAM_EXPECT(field != schema.end(), "no configuration key {}", key);
    if (field->show(config.run) != field->show(defaults)) continue;
    problems.add("`{}` is needed to {} and is not set: {}; allowed: {}", key, needed_by, field->meaning,
                 field->allowed);
  }
  problems.throw_if_any("configuration");
}

}  // namespace layerstream
