#include <fmt/ranges.h>

#include <algorithm>

#include "core/config_namer.hpp"
#include "core/weight_decay_rule.hpp"

namespace layerstream {
namespace {

void check_attention(const RunConfig& run, const Namer& name, ConfigProblems& problems) {
  check_owners("attention_pattern",
               {{"attention_window", {"window"}},
                {"attention_block", {"blocks"}},
                {"attention_local_blocks", {"blocks"}},
                {"attention_global_tokens", {"window", "blocks"}}},
               name, problems);
  const AttentionPattern& pattern = run.attention_pattern;
  if (pattern.type == AttentionPatternType::full) return;
  bool complete = true;
  const auto need = [&](std::string_view key, std::int64_t value) {
    if (value > 0) return;
    problems.add("{} needs {} of 1 or more, and has {}", name("attention_pattern"), key, name(key));
    complete = false;
  };
  const bool is_window = pattern.type == AttentionPatternType::window;
  if (is_window) {
    need("attention_window", pattern.window);
  } else {
    need("attention_block", pattern.block);
    need("attention_local_blocks", pattern.local_blocks);
  }
  if (!complete || pattern.global_tokens < 0) return;
  const std::int64_t dense = pattern.dense_tokens();
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

bool tokens_of_a_step_overflow(const RunConfig& run) {
  std::int64_t rows = 0;
  std::int64_t tokens = 0;
  return __builtin_mul_overflow(run.per_device_train_batch_size, run.gradient_accumulation_steps, &rows) ||
         __builtin_mul_overflow(rows, run.cutoff_len, &tokens);
}

}  // namespace

void check_owners(std::string_view owner, const std::vector<OwnedKey>& keys, const Namer& name,
                  ConfigProblems& problems) {
  for (const OwnedKey& key : keys) {
    const bool is_used = std::ranges::find(key.owners, name.value(owner)) != key.owners.end();
    if (is_used || name.is_default(key.name)) continue;
    problems.add("{} means nothing with {}; drop it, or set {}: {}", name(key.name), name(owner), owner,
                 fmt::join(key.owners, " or "));
  }
}

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
  check_data(run, name, problems);
  check_evaluation(run, name, problems);
  for (const std::string& rule : run.weight_decay_rules) {
    if (parse_weight_decay_rule(rule)) continue;
    problems.add("{}: \"{}\" is no rule; write \"pattern=decay\", with a decay of 0 or more",
                 name("weight_decay_rules"), rule);
  }
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
