#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/attention_pattern.hpp"
#include "core/dtype.hpp"
#include "core/lr_scheduler.hpp"
#include "core/rope_precision.hpp"

namespace layerstream {

enum class BackendChoice : std::uint8_t { automatic, explicit_copies, coherent };
/// What a block keeps from its forward pass for its backward pass; the rest is recomputed.
enum class ActivationPolicy : std::uint8_t { input, input_attention, all };
enum class OptimizerUpdate : std::uint8_t { deferred, immediate };
/// What comes first: all micro-batches through a block, or all blocks for a micro-batch.
enum class LoopOrder : std::uint8_t { layer_major, micro_batch_major };
/// Whether host memory must be pinned for copies: automatic goes on, slower, when it cannot be.
enum class PinMemory : std::uint8_t { automatic, required, off };
enum class Overlong : std::uint8_t { split, truncate, drop, error };
enum class OnBadLine : std::uint8_t { error, skip };
/// How several datasets become one; under: until the first is used up; over: until all are, with repetitions.
enum class MixStrategy : std::uint8_t { concat, interleave_under, interleave_over };
enum class EvalStrategy : std::uint8_t { no, steps, epoch };
/// best: whenever an evaluation finds a lower loss than all before it. The end of a run is always saved.
enum class SaveStrategy : std::uint8_t { no, steps, epoch, best };

/// Everything a run can be told. Names, meanings and defaults follow Hugging Face's TrainingArguments
/// where they have the thing, LLaMA-Factory's data keys for data; the keys of the YAML file are the
/// member names. Where the default differs from theirs, the comment says why.
inline constexpr std::int64_t default_chunk_tokens = 8192;

struct RunConfig {
  // Model
  std::string model_name_or_path;  ///< a Hugging Face directory: config.json + safetensors
  std::string config_name;         ///< config.json (or its directory) of a model to train from scratch

  // Data
  std::vector<std::string> train_file;       ///< text files, directories, or token shards (.safetensors)
  std::vector<std::string> validation_file;  ///< the same, held out
  std::int64_t cutoff_len = 2048;            ///< tokens of a row
  bool packing = true;                       ///< several documents in a row; they never attend to each other
  Overlong overlong = Overlong::split;       ///< documents longer than a row
  OnBadLine on_bad_line = OnBadLine::error;  ///< text that is not UTF-8, ids outside the vocabulary

  // Datasets that tools/prepare_data turns into token shards before the run reads them
  std::vector<std::string> dataset;       ///< files, directories, or names in dataset_info.json
  std::vector<std::string> eval_dataset;  ///< the same, held out
  std::string dataset_dir = "data";       ///< holds dataset_info.json
  std::string tokenizer_name;             ///< a Hugging Face directory; empty: model_name_or_path
  std::string chat_template;              ///< a Jinja file; empty: the tokenizer's own
  bool train_on_prompt = false;
  bool mask_history = false;
  MixStrategy mix_strategy = MixStrategy::concat;
  std::vector<double> interleave_probs;  ///< one for each dataset; empty: equal
  std::string tokenized_path;            ///< where shards are kept; empty: a cache below dataset_dir
  std::string python = "python3";

  // Training
  std::string output_dir;
  std::uint64_t seed = 42;
  double learning_rate = 5e-5;
  SchedulerType lr_scheduler_type = SchedulerType::linear;
  LrSchedulerKwargs lr_scheduler_kwargs;  ///< keys `lr_scheduler_kwargs.num_cycles` and so on
  std::int64_t warmup_steps = 0;
  double warmup_ratio = 0.0;
  double num_train_epochs = 3.0;
  std::int64_t max_steps = -1;  ///< > 0 overrides num_train_epochs
  std::int64_t per_device_train_batch_size = 8;
  std::int64_t gradient_accumulation_steps = 1;
  double weight_decay = 0.0;
  std::vector<std::string>
      weight_decay_rules;  ///< "pattern=decay", see WeightDecayRule; the last that fits counts
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  std::vector<std::string> frozen_parameters;  ///< patterns (see fits_pattern) of names that do not move
  double max_grad_norm = 1.0;                  ///< 0: no clipping
  std::int64_t max_skipped_steps = 10;         ///< steps that are left out in a row before the run stops
  // Steps that are left out because they stand out from those before them (see RecentValues); 0: none
  double skip_loss_zscore = 0.0;
  double skip_grad_norm_zscore = 0.0;

  // Evaluation
  EvalStrategy eval_strategy = EvalStrategy::no;
  std::int64_t eval_steps = 500;
  bool eval_on_start = false;
  std::int64_t max_eval_samples = 0;  ///< rows of an evaluation, from the first on; 0: all
  std::int64_t early_stopping_patience =
      0;                                  ///< evaluations without a better loss before the run ends; 0: never
  double early_stopping_threshold = 0.0;  ///< how much better, in nats per token

  // Saving and logging
  std::int64_t logging_steps = 1;  ///< theirs is 500: a line per step is what a long step wants
  SaveStrategy save_strategy = SaveStrategy::steps;
  std::int64_t save_steps = 500;       ///< 0: only at the end
  std::int64_t save_total_limit = 0;   ///< 0: keep all; the best and the major ones are kept beside
  std::int64_t save_major_steps = 0;   ///< checkpoints at its multiples are never removed; 0: none
  std::vector<std::string> report_to;  ///< csv, tensorboard: beside metrics.jsonl
  std::string resume_from_checkpoint;  ///< a checkpoint directory, or "auto": the newest complete one

  // Engine: none of these changes a bit of the result, except compute_dtype, rope, the attention keys and the
  // two tile sizes
  DType compute_dtype = DType::bf16;
  RopePrecision rope = RopePrecision::exact;
  AttentionPattern attention_pattern =
      {};  ///< keys `attention_pattern`, `attention_window` and so on; 0: not given
  BackendChoice backend = BackendChoice::automatic;
  bool allow_emulation = false;  ///< coherent backend on a device without coherent memory
  OptimizerUpdate optimizer_update = OptimizerUpdate::deferred;
  /// Rates for the planner: a profile that is shipped, by name, or a file; empty: the one of this machine.
  std::string hardware_profile;
  // Placement: what is not given is the planner's choice; without rates, with_default_placement's
  std::optional<std::int64_t> weight_slots;
  std::optional<LoopOrder> loop_order;
  std::optional<ActivationPolicy> activation_policy;
  /// Decoder blocks, counted from the last, that activation_policy holds for; the others keep their input.
  std::optional<std::int64_t> activation_blocks;
  /// Of a row longer than a chunk the chunks, counted from the last, that it holds for.
  std::optional<std::int64_t> activation_chunks;
  /// Decoder blocks, counted from the last, that keep on the device what they keep; the others on the host.
  std::optional<std::int64_t> device_activation_blocks;
  std::optional<double> optimizer_device_share;  ///< fraction of each block whose update is the device's
  std::optional<std::int64_t> resident_blocks;   ///< the first blocks' weights and moments stay on the device
  std::optional<bool> gradients_on_host;  ///< key `gradient_home`: where gradients of the device's share wait
  std::optional<bool> updates_in_place;   ///< key `device_update: staged | in_place`
  std::optional<std::int64_t> device_update_blocks;  ///< thread blocks of an update in place
  std::optional<bool> promotes_by_kernel;            ///< key `weight_promotion: copy_engine | kernel`
  PinMemory pin_memory = PinMemory::automatic;
  std::string numa = "auto";           ///< host node: auto (the CPUs' node nearest the device), off, a number
  std::int64_t optimizer_threads = 0;  ///< 0: what the affinity mask leaves
  /// Tokens that go through a block at once; not given: default_chunk_tokens, or the next power of two below
  /// it with which the run fits.
  std::optional<std::int64_t> chunk_tokens;
  std::int64_t loss_tile_tokens = 2048;
  std::optional<std::uint64_t> device_memory_limit;  ///< bytes; also "24GiB"
  std::optional<std::uint64_t> host_memory_limit;
  bool deterministic = true;

  // Profiling: keys `profile.start_step`, `profile.num_steps`, `profile.kernels`
  std::int64_t profile_start_step = 1;
  std::int64_t profile_num_steps = 0;  ///< 0: no window
  bool profile_kernels = false;
};

}  // namespace layerstream
