#include "engine/resume_checks.hpp"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "core/config.hpp"
#include "core/error.hpp"
#include "longctx/rope.hpp"
#include "model/layout.hpp"

namespace layerstream {

RunConfig settings_of(const io::CheckpointReader& checkpoint) {
  return parse_config(checkpoint.text("run.yaml"), checkpoint.path("run.yaml").string()).run;
}

void check_same_model(const io::CheckpointReader& checkpoint, const HfConfigText& config,
                      const ModelSpec& spec) {
  const std::string place = checkpoint.path("config.json").string();
  const std::string text = checkpoint.text("config.json");
  ModelSpec saved = parse_hf_config(text, place);
  saved.dtype = spec.dtype;  // how weights are stored, and how fresh ones are made, is no matter now
  saved.initializer_range = spec.initializer_range;
  if (saved == spec) return;
  const nlohmann::json before = nlohmann::json::parse(text);
  const nlohmann::json now = nlohmann::json::parse(config.text);
  nlohmann::json all = before;
  all.update(now);
  std::string differing;
  for (const auto& [key, value] : all.items()) {
    if (before.contains(key) && now.contains(key) && before[key] == now[key]) continue;
    differing += (differing.empty() ? "" : ", ") + key;
  }
  throw ConfigError(fmt::format("{}: the checkpoint's model is not that of {}; keys that differ: {}", place,
                                config.path, differing));
}

void check_same_data(const TrainerState& saved, const TrainerState& now, const std::filesystem::path& place) {
  const auto require = [&](std::string_view what, auto in_checkpoint, auto wanted) {
    if (in_checkpoint == wanted) return;
    throw ConfigError(
        fmt::format("{}: {} was {} and is {} now, so the run would not continue where it stopped; set it "
                    "back, or start a new run with model_name_or_path from an export",
                    place.string(), what, in_checkpoint, wanted));
  };
  require("seed", saved.seed, now.seed);
  require("per_device_train_batch_size x gradient_accumulation_steps", saved.rows_per_step,
          now.rows_per_step);
  require("the content of the training data (train_file, cutoff_len, packing, overlong)", saved.data_hash,
          now.data_hash);
}

void check_moments(const std::vector<std::string>& frozen_before, const std::vector<std::string>& frozen_now,
                   const ModelSpec& spec, const std::filesystem::path& place) {
  const ModelLayout saved = make_layout(spec, frozen_before);
  const ModelLayout wanted = make_layout(spec, frozen_now);
  for (int block = 0; block < saved.num_blocks(); ++block) {
    if (!saved.is_frozen(block) || wanted.is_frozen(block)) continue;
    throw ConfigError(fmt::format(
        "frozen_parameters: {} was frozen when {} was written, which has no moments of it; give frozen_parameters as "
        "it was ([{}]), or start a new run with model_name_or_path from an export",
        saved.blocks[static_cast<std::size_t>(block)].parameters.front().name, place.string(),
        fmt::join(frozen_before, ", ")));
  }
}

std::string changed_settings(const RunConfig& before, const RunConfig& now, const ModelSpec& spec) {
  std::string changes;
  const auto compare = [&](std::string_view key, const auto& old_value, const auto& new_value) {
    if (old_value != new_value) changes += fmt::format("{}{}", changes.empty() ? "" : ", ", key);
  };
  compare("max_steps", before.max_steps, now.max_steps);
  compare("num_train_epochs", before.num_train_epochs, now.num_train_epochs);
  compare("learning_rate", before.learning_rate, now.learning_rate);
  compare("lr_scheduler_type", before.lr_scheduler_type, now.lr_scheduler_type);
  compare("lr_scheduler_kwargs", before.lr_scheduler_kwargs, now.lr_scheduler_kwargs);
  compare("warmup_steps", before.warmup_steps, now.warmup_steps);
  compare("warmup_ratio", before.warmup_ratio, now.warmup_ratio);
  compare("weight_decay", before.weight_decay, now.weight_decay);
  compare("weight_decay_rules", before.weight_decay_rules, now.weight_decay_rules);
  compare("frozen_parameters", before.frozen_parameters, now.frozen_parameters);
  compare("skip_loss_zscore", before.skip_loss_zscore, now.skip_loss_zscore);
  compare("skip_grad_norm_zscore", before.skip_grad_norm_zscore, now.skip_grad_norm_zscore);
  compare("adam_beta1", before.adam_beta1, now.adam_beta1);
  compare("adam_beta2", before.adam_beta2, now.adam_beta2);
  compare("adam_epsilon", before.adam_epsilon, now.adam_epsilon);
  compare("max_grad_norm", before.max_grad_norm, now.max_grad_norm);
  compare("compute_dtype", before.compute_dtype, now.compute_dtype);
  compare("rope", before.rope, now.rope);
  compare("attention_pattern and its keys", before.attention_pattern, now.attention_pattern);
  // Rows may be what they were, and yet turn by other angles.
  const auto frequencies = [&](const RunConfig& run) {
    return rope_frequencies(spec.rope, spec.head_dim, spec.max_position_embeddings, run.cutoff_len);
  };
  compare("cutoff_len (rope_parameters depend on it)", frequencies(before), frequencies(now));
  compare("chunk_tokens", before.chunk_tokens.value_or(default_chunk_tokens),
          now.chunk_tokens.value_or(default_chunk_tokens));
  compare("loss_tile_tokens", before.loss_tile_tokens, now.loss_tile_tokens);
  return changes;
}

}  // namespace layerstream
