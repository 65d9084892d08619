#include "core/config_schema.hpp"

#include <fmt/format.h>

#include <limits>
#include <utility>

namespace layerstream {
namespace {

constexpr std::int64_t max_count = std::numeric_limits<std::int32_t>::max();
constexpr double infinity = std::numeric_limits<double>::infinity();

struct Name {
  std::string_view section;
  std::string_view key;
  std::string_view meaning;
  std::vector<std::string_view> names_elsewhere = {};
};

ConfigField field(Name name, std::string allowed) {
  ConfigField result;
  result.section = name.section;
  result.key = name.key;
  result.meaning = name.meaning;
  result.allowed = std::move(allowed);
  result.names_elsewhere = std::move(name.names_elsewhere);
  result.in_range = [](const RunConfig&) { return true; };
  return result;
}

bool is_scalar(const ConfigValue& value) {
  return value.kind == ConfigValue::Kind::scalar;
}

template <class T>
const T& held(const T& member) {
  return member;
}
/// @pre it is given
template <class T>
const T& held(const std::optional<T>& member) {
  return *member;
}

/// Lets an optional key be null: "not given".
template <class T>
ConfigField or_null(std::optional<T> RunConfig::*member, std::string_view null_means, ConfigField field) {
  field.allowed += fmt::format("; null for {}", null_means);
  field.assign = [member, assign = std::move(field.assign)](RunConfig& run, const ConfigValue& value) {
    if (value.kind != ConfigValue::Kind::null) return assign(run, value);
    (run.*member).reset();
    return true;
  };
  field.in_range = [member, in_range = std::move(field.in_range)](const RunConfig& run) {
    return !(run.*member) || in_range(run);
  };
  field.show = [member, show = std::move(field.show)](const RunConfig& run) {
    return run.*member ? show(run) : std::string("null");
  };
  return field;
}

struct IntRange {
  std::int64_t min;
  std::int64_t max = max_count;
};

/// Of these fields M is the type of the value, or an optional one (see or_null).
template <class M>
ConfigField integer(Name name, M RunConfig::*member, IntRange range) {
  ConfigField result =
      field(std::move(name), range.max == max_count ? fmt::format("integer >= {} and < 2^31", range.min)
                                                    : fmt::format("integer {} to {}", range.min, range.max));
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_int(value.text) : std::nullopt;
    if (parsed) run.*member = *parsed;
    return parsed.has_value();
  };
  result.in_range = [member, range](const RunConfig& run) {
    const std::int64_t value = held(run.*member);
    return value >= range.min && value <= range.max;
  };
  result.show = [member](const RunConfig& run) { return fmt::format("{}", held(run.*member)); };
  return result;
}

struct RealRange {
  double min;
  bool min_included;
  double max = infinity;
  bool max_included = true;
};

template <class M>
ConfigField real(Name name, M RunConfig::*member, RealRange range) {
  std::string allowed = fmt::format("number {} {}", range.min_included ? ">=" : ">", range.min);
  if (range.max != infinity) {
    allowed += fmt::format(" and {} {}", range.max_included ? "<=" : "<", range.max);
  }
  ConfigField result = field(std::move(name), std::move(allowed));
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_real(value.text) : std::nullopt;
    if (parsed) run.*member = *parsed;
    return parsed.has_value();
  };
  result.in_range = [member, range](const RunConfig& run) {
    const double value = held(run.*member);
    const bool above = range.min_included ? value >= range.min : value > range.min;
    const bool below = range.max_included ? value <= range.max : value < range.max;
    return above && below && value < infinity;
  };
  result.show = [member](const RunConfig& run) { return format_real(held(run.*member)); };
  return result;
}

ConfigField boolean(Name name, bool RunConfig::*member) {
  ConfigField result = field(std::move(name), "true or false");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_bool(value.text) : std::nullopt;
    if (parsed) run.*member = *parsed;
    return parsed.has_value();
  };
  result.show = [member](const RunConfig& run) { return run.*member ? "true" : "false"; };
  return result;
}

ConfigField unsigned_integer(Name name, std::uint64_t RunConfig::*member) {
  ConfigField result = field(std::move(name), "integer >= 0 and < 2^64");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_unsigned(value.text) : std::nullopt;
    if (parsed) run.*member = *parsed;
    return parsed.has_value();
  };
  result.show = [member](const RunConfig& run) { return fmt::format("{}", run.*member); };
  return result;
}

/// A null is the empty text: "not given".
ConfigField text(Name name, std::string RunConfig::*member, std::string allowed) {
  ConfigField result = field(std::move(name), std::move(allowed));
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    if (!is_scalar(value) && value.kind != ConfigValue::Kind::null) return false;
    run.*member = value.text;
    return true;
  };
  result.show = [member](const RunConfig& run) { return format_string(run.*member); };
  return result;
}

ConfigField path_list(Name name, std::vector<std::string> RunConfig::*member) {
  ConfigField result = field(std::move(name), "a path, or a list of paths");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    std::vector<std::string> paths;
    if (is_scalar(value)) paths.push_back(value.text);
    for (const ConfigValue& item : value.items) {
      if (!is_scalar(item)) return false;
      paths.push_back(item.text);
    }
    if (value.kind == ConfigValue::Kind::map) return false;
    run.*member = std::move(paths);
    return true;
  };
  result.in_range = [member](const RunConfig& run) {
    for (const std::string& path : run.*member) {
      if (path.empty()) return false;
    }
    return true;
  };
  result.show = [member](const RunConfig& run) {
    std::string list;
    for (const std::string& path : run.*member) list += (list.empty() ? "" : ", ") + format_string(path);
    return "[" + list + "]";
  };
  return result;
}

ConfigField bytes(Name name, std::optional<std::uint64_t> RunConfig::*member) {
  ConfigField result = field(std::move(name), "bytes >= 1 such as 24GiB, \"40 GB\" or 1073741824");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    const auto parsed = is_scalar(value) ? parse_bytes(value.text) : std::nullopt;
    if (parsed) run.*member = parsed;
    return parsed.has_value();
  };
  result.in_range = [member](const RunConfig& run) { return held(run.*member) >= 1; };
  result.show = [member](const RunConfig& run) { return byte_size_text(held(run.*member)); };
  return result;
}

/// "auto", "off" or the number of a NUMA node.
ConfigField numa_node(Name name, std::string RunConfig::*member) {
  ConfigField result = field(std::move(name), "auto, off, or a node's number");
  result.assign = [member](RunConfig& run, const ConfigValue& value) {
    if (!is_scalar(value)) return false;
    // YAML 1.1 readers write `off` as false.
    run.*member = value.text == "false" ? "off" : value.text;
    return true;
  };
  result.in_range = [member](const RunConfig& run) {
    const std::string& value = run.*member;
    if (value == "auto" || value == "off") return true;
    const auto node = parse_int(value);
    return node && *node >= 0 && *node < 1024;
  };
  result.show = [member](const RunConfig& run) { return run.*member; };
  return result;
}

template <class T, class M>
ConfigField choice(Name name, M RunConfig::*member, std::vector<std::pair<std::string_view, T>> choices) {
  std::string allowed;
  for (const auto& [word, value] : choices) {
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", word);
  }
  ConfigField result = field(std::move(name), "one of " + allowed);
  result.assign = [member, choices](RunConfig& run, const ConfigValue& value) {
    for (const auto& [word, stored] : choices) {
      if (!is_scalar(value) || value.text != word) continue;
      run.*member = stored;
      return true;
    }
    return false;
  };
  result.in_range = [member, choices](const RunConfig& run) {
    for (const auto& [word, stored] : choices) {
      if (held(run.*member) == stored) return true;
    }
    return false;
  };
  result.show = [member, choices](const RunConfig& run) -> std::string {
    for (const auto& [word, stored] : choices) {
      if (held(run.*member) == stored) return std::string(word);
    }
    return "?";
  };
  return result;
}

}  // namespace

std::vector<ConfigField> config_schema() {
  using C = RunConfig;
  static constexpr std::string_view model = "Model";
  static constexpr std::string_view data = "Data";
  static constexpr std::string_view training = "Training";
  static constexpr std::string_view saving = "Saving and logging";
  static constexpr std::string_view engine = "Engine";
  static constexpr std::string_view placement = "Placement";
  static constexpr std::string_view profiling = "Profiling";
  static constexpr std::string_view planned = "the planner's choice";

  ConfigField max_steps = integer({training,
                                   "max_steps",
                                   "optimizer steps; above 0 it overrides num_train_epochs",
                                   {"steps", "train_steps", "num_steps", "max_train_steps"}},
                                  &C::max_steps, {.min = -1});
  max_steps.allowed += "; 0 or less leaves it to num_train_epochs";

  return {
      text({model,
            "model_name_or_path",
            "model to continue from: its config.json and weights",
            {"model", "model_name", "model_path", "pretrained_model_name_or_path"}},
           &C::model_name_or_path, "a Hugging Face model directory"),
      text({model, "config_name", "model to train from scratch", {"model_config", "config", "config_path"}},
           &C::config_name, "a config.json or its directory"),

      path_list({data,
                 "train_file",
                 "text files, directories of them, or token shards (.safetensors)",
                 {"dataset", "dataset_name", "train_files", "data", "data_path", "train_data"}},
                &C::train_file),
      integer({data,
               "cutoff_len",
               "tokens of a row",
               {"max_seq_length", "max_seq_len", "max_length", "seq_length", "seq_len", "block_size",
                "sequence_length", "context_length"}},
              &C::cutoff_len, {.min = 2}),
      boolean({data,
               "packing",
               "put several documents in a row; they never attend to each other",
               {"neat_packing", "sample_packing"}},
              &C::packing),
      choice<Overlong>({data, "overlong", "what becomes of a document longer than a row", {"truncation"}},
                       &C::overlong,
                       {{"split", Overlong::split},
                        {"truncate", Overlong::truncate},
                        {"drop", Overlong::drop},
                        {"error", Overlong::error}}),
      choice<OnBadLine>(
          {data, "on_bad_line", "what becomes of text that is not UTF-8 and ids outside the vocabulary"},
          &C::on_bad_line, {{"error", OnBadLine::error}, {"skip", OnBadLine::skip}}),

      text({training, "output_dir", "checkpoints and metrics", {"output", "out_dir", "save_dir"}},
           &C::output_dir, "a directory; made if missing"),
      unsigned_integer({training, "seed", "of initial weights and of the order of the data", {"data_seed"}},
                       &C::seed),
      real({training, "learning_rate", "peak learning rate", {"lr", "max_lr"}}, &C::learning_rate,
           {0.0, true}),
      choice<SchedulerType>({training,
                             "lr_scheduler_type",
                             "shape of the learning rate after the warm-up",
                             {"lr_scheduler", "scheduler", "lr_schedule", "schedule"}},
                            &C::lr_scheduler_type,
                            {{"constant", SchedulerType::constant},
                             {"linear", SchedulerType::linear},
                             {"cosine", SchedulerType::cosine}}),
      integer({training, "warmup_steps", "steps of linear warm-up", {"lr_warmup_steps", "warmup"}},
              &C::warmup_steps, {.min = 0}),
      real({training, "warmup_ratio", "warm-up as a part of all steps, where warmup_steps is 0"},
           &C::warmup_ratio, {0.0, true, 1.0}),
      real({training, "num_train_epochs", "passes over the data", {"epochs", "num_epochs", "max_epochs"}},
           &C::num_train_epochs, {0.0, true}),
      std::move(max_steps),
      integer({training,
               "per_device_train_batch_size",
               "rows of a micro-batch",
               {"batch_size", "train_batch_size", "micro_batch_size", "per_gpu_train_batch_size"}},
              &C::per_device_train_batch_size, {.min = 1}),
      integer({training,
               "gradient_accumulation_steps",
               "micro-batches of an optimizer step",
               {"accumulation_steps", "grad_accum", "grad_accumulation_steps"}},
              &C::gradient_accumulation_steps, {.min = 1}),
      real(
          {training, "weight_decay", "decoupled decay of matrices; norms and biases are not decayed", {"wd"}},
          &C::weight_decay, {0.0, true}),
      real({training, "adam_beta1", "AdamW: decay of the first moment", {"beta1"}}, &C::adam_beta1,
           {0.0, true, 1.0, false}),
      real({training, "adam_beta2", "AdamW: decay of the second moment", {"beta2"}}, &C::adam_beta2,
           {0.0, true, 1.0, false}),
      real({training, "adam_epsilon", "AdamW: added to the denominator", {"adam_eps", "eps", "epsilon"}},
           &C::adam_epsilon, {0.0, false}),
      real({training,
            "max_grad_norm",
            "global norm to which gradients are clipped; 0: no clipping",
            {"grad_clip", "clip_grad_norm", "gradient_clipping", "clip_norm"}},
           &C::max_grad_norm, {0.0, true}),
      integer({training, "max_skipped_steps", "steps with NaN or Inf in a row before the run stops"},
              &C::max_skipped_steps, {.min = 1}),

      integer({saving, "logging_steps", "steps between progress lines", {"log_steps", "log_interval"}},
              &C::logging_steps, {.min = 1}),
      integer({saving,
               "save_steps",
               "steps between checkpoints; 0: only at the end",
               {"checkpoint_steps", "save_interval"}},
              &C::save_steps, {.min = 0}),
      integer({saving, "save_total_limit", "checkpoints that are kept; 0: all", {"keep_checkpoints"}},
              &C::save_total_limit, {.min = 0}),
      text({saving,
            "resume_from_checkpoint",
            "checkpoint to go on from; auto: the newest complete one in output_dir",
            {"resume", "resume_from", "checkpoint"}},
           &C::resume_from_checkpoint, "a checkpoint directory, or auto"),

      choice<DType>({engine,
                     "compute_dtype",
                     "format in which matrices are multiplied; master weights are FP32",
                     {"bf16", "fp16", "dtype", "torch_dtype", "precision", "mixed_precision"}},
                    &C::compute_dtype, {{"fp32", DType::f32}, {"bf16", DType::bf16}}),
      choice<RopePrecision>({engine,
                             "rope",
                             "angles of the rotary embedding: exact, in FP64; hf, in FP32 as transformers "
                             "rounds them, which errs more the longer the row",
                             {"rope_precision"}},
                            &C::rope, {{"exact", RopePrecision::exact}, {"hf", RopePrecision::hf}}),
      choice<AttentionPatternType>(
          {engine,
           "attention_pattern",
           "keys of its document that a token attends to; full: all before it; window: the last "
           "attention_window; blocks: its own block of tokens and those before it, attention_local_blocks in all. "
           "All but full change what the model computes",
           {"attention_type", "sparse_attention", "sliding_window"}},
          &C::attention_pattern,
          {{"full", AttentionPatternType::full},
           {"window", AttentionPatternType::window},
           {"blocks", AttentionPatternType::blocks}}),
      integer({engine,
               "attention_window",
               "attention_pattern: window: keys of a token, its own included",
               {"window_size", "window"}},
              &C::attention_window, {.min = 0}),
      integer(
          {engine,
           "attention_block",
           "attention_pattern: blocks: tokens of a block; each is a call of its own, so hundreds are fast",
           {"attention_block_size"}},
          &C::attention_block, {.min = 0}),
      integer({engine,
               "attention_local_blocks",
               "attention_pattern: blocks: a token's own block and those right before it",
               {"num_local_blocks"}},
              &C::attention_local_blocks, {.min = 0}),
      integer({engine,
               "attention_global_tokens",
               "first tokens of a document that all its tokens attend to as well, with window or blocks",
               {"attention_sinks", "num_sink_tokens", "global_tokens"}},
              &C::attention_global_tokens, {.min = 0}),
      choice<BackendChoice>(
          {engine,
           "backend",
           "how weights reach the device; auto: coherent where it shares the host's page tables",
           {"memory_backend"}},
          &C::backend,
          {{"auto", BackendChoice::automatic},
           {"explicit", BackendChoice::explicit_copies},
           {"coherent", BackendChoice::coherent}}),
      boolean({engine, "allow_emulation", "coherent backend on a device without coherent memory"},
              &C::allow_emulation),
      choice<OptimizerUpdate>(
          {engine, "optimizer_update", "deferred: once the norm is known; immediate: as each gradient lands"},
          &C::optimizer_update,
          {{"deferred", OptimizerUpdate::deferred}, {"immediate", OptimizerUpdate::immediate}}),
      choice<PinMemory>(
          {engine,
           "pin_memory",
           "host memory pinned for copies; auto: not on a device that shares the host's page tables, and without, "
           "slower, where the system refuses",
           {"pinned_memory", "dataloader_pin_memory"}},
          &C::pin_memory,
          {{"auto", PinMemory::automatic}, {"required", PinMemory::required}, {"off", PinMemory::off}}),
      numa_node({engine,
                 "numa",
                 "host memory node of the buffers; auto: with CPUs, the nearest to the device",
                 {"numa_node"}},
                &C::numa),
      integer({engine,
               "optimizer_threads",
               "host threads of the optimizer; 0: what the affinity mask leaves",
               {"cpu_threads", "num_threads"}},
              &C::optimizer_threads, {.min = 0, .max = 4096}),
      or_null(&C::chunk_tokens, "8192, or less where the run would not fit, and when resuming for what it was",
              integer({engine, "chunk_tokens", "tokens that go through a block at once", {"chunk_size", "chunk_len"}},
                      &C::chunk_tokens, {.min = 1})),
      integer(
          {engine, "loss_tile_tokens", "tokens whose logits exist at once", {"loss_chunk_size", "loss_tile"}},
          &C::loss_tile_tokens, {.min = 1}),
      or_null(&C::device_memory_limit, "what the machine has",
              bytes({engine, "device_memory_limit", "device memory that may be used", {"gpu_memory_limit"}},
                    &C::device_memory_limit)),
      or_null(&C::host_memory_limit, "what the machine has",
              bytes({engine, "host_memory_limit", "host memory that may be used", {"cpu_memory_limit"}},
                    &C::host_memory_limit)),
      boolean({engine,
               "deterministic",
               "the same bits wherever things are placed; false permits kernels that do not keep this (a CPU "
               "build has none)",
               {"full_determinism"}},
              &C::deterministic),

      text({placement, "hardware_profile",
            "what the planner takes the machine to be; empty: the profile of this machine, if there is one"},
           &C::hardware_profile, "the name of a shipped profile, or a file that layerstream calibrate wrote"),
      or_null(&C::weight_slots, planned,
              integer({placement,
                       "weight_slots",
                       "device buffers for the weights of one block each",
                       {"slots", "num_slots"}},
                      &C::weight_slots, {.min = 1, .max = 1024})),
      or_null(&C::loop_order, planned,
              choice<LoopOrder>({placement, "loop_order",
                                 "layer_major: all micro-batches go through a block before the next; "
                                 "micro_batch_major: a micro-batch goes through all blocks before the next"},
                                &C::loop_order,
                                {{"layer_major", LoopOrder::layer_major},
                                 {"micro_batch_major", LoopOrder::micro_batch_major}})),
      or_null(&C::activation_policy, planned,
              choice<ActivationPolicy>({placement,
                                        "activation_policy",
                                        "what a block keeps for its backward pass; the rest is recomputed",
                                        {"gradient_checkpointing", "activation_checkpointing", "recompute"}},
                                       &C::activation_policy,
                                       {{"input", ActivationPolicy::input},
                                        {"input+attention", ActivationPolicy::input_attention},
                                        {"all", ActivationPolicy::all}})),
      or_null(&C::activation_blocks, planned,
              integer({placement, "activation_blocks",
                       "decoder blocks, from the last on, that activation_policy holds for; the others keep "
                       "their input"},
                      &C::activation_blocks, {.min = 0})),
      or_null(&C::activation_chunks, planned,
              integer({placement, "activation_chunks",
                       "of a row longer than chunk_tokens the chunks, from the last on, that it holds for"},
                      &C::activation_chunks, {.min = 1, .max = max_count})),
      or_null(&C::device_activation_blocks, planned,
              integer({placement,
                       "device_activation_blocks",
                       "decoder blocks, from the last on, that keep on the device what they keep; the others "
                       "keep it on the host",
                       {"activation_home", "offload_activations"}},
                      &C::device_activation_blocks, {.min = 0})),
      or_null(&C::optimizer_device_share, planned,
              real({placement,
                    "optimizer_device_share",
                    "part of each block whose update is the device's; the host's threads do the rest",
                    {"optimizer_gpu_share", "twin_flow_ratio"}},
                   &C::optimizer_device_share, {0.0, true, 1.0, true})),
      or_null(&C::resident_blocks, planned,
              integer({placement,
                       "resident_blocks",
                       "blocks, from the first on, whose weights and moments stay in device memory",
                       {"num_resident_layers", "n_gpu_layers"}},
                      &C::resident_blocks, {.min = 0})),
      or_null(&C::gradients_on_host, planned,
              choice<bool>({placement,
                            "gradient_home",
                            "where gradients wait that the device's share of the update needs",
                            {"gradients_on_host", "offload_gradients"}},
                           &C::gradients_on_host, {{"host", true}, {"device", false}})),
      or_null(
          &C::updates_in_place, planned,
          choice<bool>(
              {placement,
               "device_update",
               "how the device updates state that lives on the host: staged, through buffers on the device; "
               "in_place, by a kernel on host memory (coherent backend)",
               {"optimizer_access"}},
              &C::updates_in_place, {{"staged", false}, {"in_place", true}})),
      or_null(
          &C::device_update_blocks, planned,
          integer(
              {placement, "device_update_blocks",
               "thread blocks of an update in place: few fill the link and leave the device to the passes"},
              &C::device_update_blocks, {.min = 1, .max = 65535})),
      or_null(&C::promotes_by_kernel, planned,
              choice<bool>({placement, "weight_promotion",
                            "what brings weights to the device under the coherent backend"},
                           &C::promotes_by_kernel, {{"copy_engine", false}, {"kernel", true}})),

      integer(
          {profiling,
           "profile.start_step",
           "first step that a profiler records (nsys profile -c cudaProfilerApi) and a trace is written of",
           {"profile_start_step", "profiler_start_step"}},
          &C::profile_start_step, {.min = 1}),
      integer(
          {profiling,
           "profile.num_steps",
           "steps that are recorded, each a timeline output_dir/trace-stepN.json for ui.perfetto.dev; 0: none",
           {"profile_num_steps", "profile_steps", "profiler_num_steps"}},
          &C::profile_num_steps, {.min = 0}),
      boolean({profiling,
               "profile.kernels",
               "show a profiler the label of every Kokkos kernel as well",
               {"profile_kernels", "kernel_labels"}},
              &C::profile_kernels),
  };
}

}  // namespace layerstream
