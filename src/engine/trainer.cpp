#include "engine/trainer.hpp"

#include <fmt/ranges.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "backends/free_memory.hpp"
#include "backends/peak_rates.hpp"
#include "core/affinity.hpp"
#include "core/progress.hpp"
#include "engine/alarms.hpp"
#include "engine/planner.hpp"

namespace layerstream {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Refuses to go on with a checkpoint of a model that computes something else. Throws ConfigError naming the
/// keys of config.json that differ.
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

/// The configuration that a checkpoint was written with.
RunConfig settings_of(const io::CheckpointReader& checkpoint) {
  return parse_config(checkpoint.text("run.yaml"), checkpoint.path("run.yaml").string()).run;
}

}  // namespace

HfConfigText model_config_of(const RunConfig& run) {
  return read_hf_config(run.model_name_or_path.empty() ? run.config_name : run.model_name_or_path);
}

std::string byte_token_warning(const RunConfig& run, const io::DatasetReport& report) {
  if (report.text_files == 0 || run.model_name_or_path.empty() || !has_tokenizer(run.model_name_or_path))
    return {};
  return fmt::format(
      "train_file: {} plain text files are read as byte tokens, which mean nothing to {}: it has a "
      "tokenizer of its own; name them in dataset, which tokenizes with that",
      report.text_files, run.model_name_or_path);
}

std::string long_row_warning(const ModelSpec& spec, std::int64_t row_tokens) {
  const std::int64_t positions = rope_positions(spec.rope, spec.max_position_embeddings);
  if (row_tokens <= positions) return {};
  return fmt::format(
      "cutoff_len: rows of {} tokens, where the model's rotary embedding was made for {} positions "
      "(max_position_embeddings, rope_parameters of its config.json): unless it is to learn longer ones, "
      "give the config a rope scaling (yarn, llama3, dynamic) or make rows shorter",
      row_tokens, positions);
}

std::string attention_pattern_warning(const RunConfig& run) {
  if (run.attention_pattern == AttentionPatternType::full) return {};
  return fmt::format(
      "attention_pattern: with keys left out the model computes another function than with full attention, and "
      "config.json cannot say so: whoever loads an export computes full attention; layerstream generate "
      "reads the pattern from a checkpoint");
}

Trainer::Trainer(const LoadedConfig& config, Device& device, const StopRequest& stop, const Log& log,
                 const EngineDiagnostics& diagnostics, ExecutionObserver* annotation)
    : config_(config), device_(device), stop_(stop), log_(log), diagnostics_(diagnostics) {
  const RunConfig& run = config_.run;
  check_config(config_);
  if (io::data_key(run, io::DataRole::train).empty()) require_keys(config_, {"train_file"}, "train");
  require_keys(config_, {"output_dir"}, "train");
  for (const std::string& warning : thread_warnings(probe_cpus(), OpenMpSettings::of_this_process())) {
    log_.warning("{}", warning);
  }
  if (const std::string warning = free_memory_warning(device_); !warning.empty()) log_.warning("{}", warning);
  model_config_ = model_config_of(run);
  spec_ = parse_hf_config(model_config_.text, model_config_.path);
  if (const std::string warning = long_row_warning(spec_, run.cutoff_len); !warning.empty()) {
    log_.warning("{}", warning);
  }
  if (const std::string warning = attention_pattern_warning(run); !warning.empty()) {
    log_.warning("{}", warning);
  }
  const WeightSource source = open_weights();
  if (source.checkpoint && !run.chunk_tokens) {
    config_.run.chunk_tokens = settings_of(*source.checkpoint).chunk_tokens;
  }
  // What the engine alone needs is known before minutes go into reading data.
  place(0);
  read_data();
  plan_steps();
  if (source.checkpoint) adopt_state(*source.checkpoint);
  check_same_held_out_data();
  if (!shortfall(plan_run(spec_, placed_, device_, data_bytes()).ledger,
                 host_budget(run, host_node(run, device_).node), device_)
           .empty()) {
    place(data_bytes());
  }
  config_.run.chunk_tokens = placed_.chunk_tokens;  // it changes sums: the run's, wherever it goes on
  check_disk_space();

  monitor_ = std::make_unique<StepMonitor>(
      device_, StepMonitor::Observers{.always = diagnostics.observer, .annotation = annotation},
      ProfileWindow{.first_step = run.profile_start_step, .num_steps = run.profile_num_steps},
      run.output_dir);
  diagnostics_.observer = &monitor_->observer();
  engine_ = make_engine(placed_, {});
  io::FileSystem files;
  io::create_directories(files, run.output_dir);
  await_requests();
  log_banner();
  measure_rates();
  first_step_ = state_.global_step;
  load_state(source);
  // Of a run that begins anew nothing that is there counts, not even an evaluation before the first step.
  metrics_ = std::make_unique<io::RunMetrics>(run.output_dir, run.report_to,
                                              source.checkpoint ? state_.global_step : -1, log_);
  planned_ = planned_step(placed_, *engine_, device_, state_.rows_per_step);
  expect_timeline();
  write_record();
}

Trainer::WeightSource Trainer::open_weights() const {
  const RunConfig& run = config_.run;
  WeightSource source;
  const std::optional<std::filesystem::path> resume_point =
      run.resume_from_checkpoint.empty() ? std::nullopt
                                         : find_resume_point(run.resume_from_checkpoint, run.output_dir);
  if (resume_point) {
    log_.info("verifying {}", resume_point->string());
    source.checkpoint.emplace(*resume_point, io::Verify::hashes);
    check_rewind(source.checkpoint->step());
    check_same_model(*source.checkpoint, model_config_, spec_);
    return source;
  }
  check_output_directory();
  if (!run.model_name_or_path.empty()) {
    source.model.emplace(run.model_name_or_path);
    check_weights(*source.model, make_layout(spec_));
  }
  return source;
}

/// Throws as placement_of does.
void Trainer::place(std::size_t data_bytes) {
  placed_ = placement_of(config_.run, data_bytes, 0);
}

/// The configuration with every placement decided. Throws ConfigError; ResourceError if the run does not fit.
RunConfig Trainer::placement_of(const RunConfig& run, std::size_t data_bytes,
                                std::size_t engine_bytes) const {
  const HostBudget host = host_budget(run, host_node(run, device_).node);
  if (const std::optional<HardwareProfile> profile = profile_of_run(run, device_)) {
    const Plan plan = plan_placement(
        spec_, run, {.profile = *profile, .device = device_, .host = host, .engine_bytes = engine_bytes},
        data_bytes);
    log_.info("plan: {} placements simulated with the rates of {}", plan.num_candidates, profile->name);
    if (run.chunk_tokens != plan.config.chunk_tokens && *plan.config.chunk_tokens < default_chunk_tokens) {
      log_.info("plan: chunk_tokens: {}, since the run does not fit with more", *plan.config.chunk_tokens);
    }
    log_lines("plan", plan.placement_yaml());
    log_lines("plan", plan.summary());
    return plan.config;
  }
  if (!device_.uses_host_memory()) {
    log_.info(
        "plan: no hardware profile of this device, so placement keys that are not given have their defaults; "
        "`layerstream calibrate` measures one for hardware_profile");
  }
  const RunConfig placed = with_default_placement(run, device_);
  check_memory(plan_run(spec_, placed, device_, data_bytes, engine_bytes).ledger, host, device_);
  return placed;
}

std::unique_ptr<Engine> Trainer::make_engine(const RunConfig& placed,
                                             const std::shared_ptr<HostRegion>& state) {
  std::string_view current = "making the engine";
  Heartbeat heartbeat(log_, std::string(current));
  const auto progress = [&](std::string_view phase, std::size_t done, std::size_t total) {
    stop_.throw_if_requested(phase);
    if (phase != current) heartbeat.set_phase(std::string(phase));
    current = phase;
    heartbeat.set_done(static_cast<double>(done), static_cast<double>(total));
  };
  return std::make_unique<Engine>(spec_, placed, EngineMode::train, device_, diagnostics_,
                                  EngineMemory{.progress = progress, .state = state});
}

void Trainer::read_data() {
  dataset_ = load_data(io::DataRole::train);
  if (!io::data_key(config_.run, io::DataRole::held_out).empty()) {
    held_out_ = load_data(io::DataRole::held_out);
  }
}

io::Dataset Trainer::load_data(io::DataRole role) {
  const std::string subject = role == io::DataRole::train ? "data" : "held-out data";
  const std::string data = role == io::DataRole::train ? "the training data" : "the held-out data";
  io::DatasetOptions options = io::dataset_options(config_.run, spec_.vocab_size);
  options.key = io::data_key(config_.run, role);
  options.inputs = prepared_inputs(role, subject, "preparing " + data);
  const std::string phase = "reading " + data;
  Heartbeat heartbeat(log_, phase);
  options.between_pieces = [&](std::int64_t done, std::int64_t total) {
    stop_.throw_if_requested(phase);
    heartbeat.set_done(static_cast<double>(done), static_cast<double>(total));
  };
  io::Dataset dataset = io::Dataset::load(options);
  log_lines(subject, dataset.report().to_text());
  const std::string warning = byte_token_warning(config_.run, dataset.report());
  if (!warning.empty()) log_.warning("{}", warning);
  stop_.throw_if_requested(phase);
  return dataset;
}

std::vector<std::string> Trainer::prepared_inputs(io::DataRole role, std::string_view subject,
                                                  const std::string& phase) {
  const Heartbeat heartbeat(log_, phase);
  return io::prepared_inputs(config_.run, role, model_config_.path,
                             {.say = [&](std::string_view line) { log_.info("{}: {}", subject, line); },
                              .poll = [&] { stop_.throw_if_requested(phase); }});
}

void Trainer::plan_steps() {
  const RunConfig& run = config_.run;
  state_.seed = run.seed;
  state_.rows_per_step = run.per_device_train_batch_size * run.gradient_accumulation_steps;
  state_.data_hash = dataset_->content_hash();
  order_ = std::make_unique<io::DataOrder>(dataset_->num_rows(), state_.rows_per_step, run.seed);
  const double steps_of_epochs =
      std::ceil(run.num_train_epochs * static_cast<double>(order_->steps_per_epoch()));
  if (run.max_steps <= 0 && !(steps_of_epochs < 0x1p53)) {
    throw ConfigError(fmt::format("num_train_epochs: {} of {} steps each are more steps than can be counted",
                                  run.num_train_epochs, order_->steps_per_epoch()));
  }
  total_steps_ = run.max_steps > 0 ? run.max_steps : static_cast<std::int64_t>(steps_of_epochs);
  schedule_ = std::make_unique<LrSchedule>(LrSchedule::of(run, total_steps_));
}

void Trainer::check_rewind(std::int64_t step) const {
  const RunConfig& run = config_.run;
  const std::optional<io::FoundCheckpoint> newest = io::newest_complete(run.output_dir);
  if (!newest || newest->step <= step) return;
  throw ConfigError(
      fmt::format("resume_from_checkpoint: {} is at step {}, but output_dir {} holds {}, which a later "
                  "resume would take instead; "
                  "choose another output_dir, or move the later checkpoints away",
                  run.resume_from_checkpoint, step, run.output_dir, newest->path.filename().string()));
}

void Trainer::check_output_directory() const {
  const RunConfig& run = config_.run;
  std::vector<std::string> passed_over;
  const std::vector<io::FoundCheckpoint> complete = io::find_checkpoints(run.output_dir, &passed_over);
  for (const std::string& reason : passed_over) log_.warning("{}", reason);
  if (complete.empty()) {
    if (passed_over.empty()) return;
    throw ConfigError(
        fmt::format("output_dir {} holds checkpoints, but none that is complete (see the warnings); repair "
                    "them, or choose another output_dir",
                    run.output_dir));
  }
  const io::FoundCheckpoint* const existing = &complete.back();
  throw ConfigError(
      fmt::format("output_dir {} holds {} of another run; continue it with resume_from_checkpoint: auto, "
                  "or choose another output_dir",
                  run.output_dir, existing->path.filename().string()));
}

void Trainer::check_disk_space() const {
  const RunConfig& run = config_.run;
  if (done()) return;
  // Those that are still to come: at multiples of this, and at the end.
  std::int64_t every = run.save_steps;
  if (run.save_strategy == SaveStrategy::no) every = 0;
  if (run.save_strategy == SaveStrategy::epoch) every = order_->steps_per_epoch();
  if (run.save_strategy == SaveStrategy::best) {
    every = run.eval_strategy == EvalStrategy::epoch ? order_->steps_per_epoch() : run.eval_steps;
  }
  const auto multiples_to_come = [&](std::int64_t of) {
    return of > 0 ? total_steps_ / of - state_.global_step / of : 0;
  };
  const std::int64_t saves = multiples_to_come(every) + (every > 0 && total_steps_ % every == 0 ? 0 : 1);
  const std::uint64_t bytes = checkpoint_bytes(make_layout(spec_, run.frozen_parameters));
  // Kept beside those of the limit: the best, and the major ones.
  const std::int64_t beside =
      run.save_total_limit > 0 ? (held_out_ ? 1 : 0) + multiples_to_come(run.save_major_steps) : 0;
  io::check_space(run.output_dir, io::required_bytes(run.output_dir, bytes, retention(), saves) +
                                      bytes * static_cast<std::uint64_t>(std::min(beside, saves)));
}

void Trainer::check_same_run(const TrainerState& saved, const std::filesystem::path& place) const {
  const auto require = [&](std::string_view what, auto in_checkpoint, auto now) {
    if (in_checkpoint == now) return;
    throw ConfigError(
        fmt::format("{}: {} was {} and is {} now, so the run would not continue where it stopped; set it "
                    "back, or start a new run with model_name_or_path from an export",
                    place.string(), what, in_checkpoint, now));
  };
  require("seed", saved.seed, state_.seed);
  require("per_device_train_batch_size x gradient_accumulation_steps", saved.rows_per_step,
          state_.rows_per_step);
  require("the content of the training data (train_file, cutoff_len, packing, overlong)", saved.data_hash,
          state_.data_hash);
}

void Trainer::warn_of_changed_settings(const io::CheckpointReader& checkpoint) const {
  const RunConfig before = settings_of(checkpoint);
  const RunConfig& now = config_.run;
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
  compare("attention_pattern and its keys", attention_pattern_of(before), attention_pattern_of(now));
  // Rows may be what they were, and yet turn by other angles.
  const auto frequencies = [&](const RunConfig& run) {
    return rope_frequencies(spec_.rope, spec_.head_dim, spec_.max_position_embeddings, run.cutoff_len);
  };
  compare("cutoff_len (rope_parameters depend on it)", frequencies(before), frequencies(now));
  compare("chunk_tokens", before.chunk_tokens.value_or(default_chunk_tokens),
          now.chunk_tokens.value_or(default_chunk_tokens));
  compare("loss_tile_tokens", before.loss_tile_tokens, now.loss_tile_tokens);
  if (changes.empty()) return;
  log_.warning("changed since {}: {}; the rest of the run will not be that of the uninterrupted one",
               checkpoint.directory().string(), changes);
}

void Trainer::adopt_state(const io::CheckpointReader& checkpoint) {
  const TrainerState saved = read_trainer_state(checkpoint);
  check_same_run(saved, checkpoint.directory());
  check_frozen(checkpoint);
  warn_of_changed_settings(checkpoint);
  state_ = saved;
}

/// Throws ConfigError if blocks are to be trained whose moments the checkpoint has not got.
void Trainer::check_frozen(const io::CheckpointReader& checkpoint) const {
  const RunConfig before = settings_of(checkpoint);
  const ModelLayout saved = make_layout(spec_, before.frozen_parameters);
  const ModelLayout now = make_layout(spec_, config_.run.frozen_parameters);
  for (int block = 0; block < saved.num_blocks(); ++block) {
    if (!saved.is_frozen(block) || now.is_frozen(block)) continue;
    throw ConfigError(fmt::format(
        "frozen_parameters: {} was frozen when {} was written, which has no moments of it; give frozen_parameters as "
        "it was ([{}]), or start a new run with model_name_or_path from an export",
        saved.blocks[static_cast<std::size_t>(block)].parameters.front().name,
        checkpoint.directory().string(), fmt::join(before.frozen_parameters, ", ")));
  }
}

void Trainer::load_state(const WeightSource& source) {
  const RunConfig& run = config_.run;
  Heartbeat heartbeat(log_, "loading weights");
  const auto poll = [&](int done, int total) {
    stop_.throw_if_requested("loading weights");
    heartbeat.set_done(done, total);
  };
  if (source.checkpoint) {
    load_checkpoint(*source.checkpoint, engine_->parameters(), poll);
    log_.info("resumed {} at step {} of {}", source.checkpoint->directory().string(), state_.global_step,
              total_steps_);
  } else if (source.model) {
    load_weights(*source.model, engine_->parameters(), poll);
    log_.info("weights of {}", run.model_name_or_path);
  } else {
    engine_->parameters().initialize(run.seed, spec_.initializer_range, engine_->pool(), poll);
    log_.info("fresh weights: normal, standard deviation {}, seed {}", spec_.initializer_range, run.seed);
  }
}

void Trainer::log_banner() const {
  const RunConfig& run = config_.run;
  const EngineShape& shape = engine_->shape();
  log_.info("model: {} parameters, {} layers, hidden {}, vocabulary {}, {}", shape.layout.num_parameters(),
            spec_.num_hidden_layers, spec_.hidden_size, spec_.vocab_size,
            spec_.tie_word_embeddings ? "tied embeddings" : "untied embeddings");
  log_.info("numbers: {} compute, fp32 master, moments and gradients; AdamW on {} with {} threads",
            name_of(shape.compute), ops::adamw_host_target(), engine_->pool().num_threads());
  log_.info("steps: {} of {} rows ({} rows an epoch); chunks of up to {} tokens", total_steps_,
            state_.rows_per_step, dataset_->num_rows(), shape.bounds.chunk_tokens);
  std::string decays;
  for (const auto& [decay, count] : engine_->weight_decay().groups(shape.layout, run.weight_decay)) {
    decays += fmt::format("{}{} of {} parameters", decays.empty() ? "" : ", ", decay,
                          format_count(static_cast<double>(count)));
  }
  log_.info("weight decay: {}", decays);
  if (const std::int64_t trained = shape.layout.num_trainable_parameters();
      trained < shape.layout.num_parameters()) {
    log_.info("frozen: {} of {} parameters",
              format_count(static_cast<double>(shape.layout.num_parameters() - trained)),
              format_count(static_cast<double>(shape.layout.num_parameters())));
  }
  log_placement();
  log_.info("output: {}", run.output_dir);
}

void Trainer::log_placement() const {
  log_.info("device: {}; backend {}: {}; {} weight slots", device_.description(), engine_->backend().name(),
            backend_decision(placed_, device_).reason, engine_->shape().schedule.weight_slots);
  const HostNode& node = engine_->host_node();
  log_.info("host memory: {}{}", node.to_text(), node.node ? "; " + engine_->host_residency().to_text() : "");
  for (const std::string& warning : engine_->host_memory_warnings()) log_.warning("{}", warning);
  if (const HostPin* const pin = engine_->host_pin(); pin != nullptr && !pin->shortfall().empty()) {
    log_.warning("{}; the rest is copied through a small pinned buffer, slower", pin->shortfall());
  }
  log_lines("memory", engine_->ledger().to_table());
}

void Trainer::measure_rates() {
  rates_ = engine_->measure_rates();
  log_.info(
      "rates: {:.1f} GB/s to the device, {:.1f} GB/s to the host; host memory {:.1f} GB/s with {} threads",
      1e-9 * rates_.to_device, 1e-9 * rates_.to_host, 1e-9 * rates_.host_memory,
      engine_->pool().num_threads());
}

/// The steps whose line may carry an alarm. In a simulation they would speak of the simulation.
bool Trainer::wants_report(std::int64_t step) const {
  constexpr std::int64_t early = 3;  // where one looks whether a run is worth its time
  return !device_.uses_host_memory() &&
         (step - first_step_ <= early || step % config_.run.logging_steps == 0 || step == total_steps_);
}

void Trainer::look_at_step(const StepResult& result) {
  report_.reset();
  try {
    StepMonitor::Seen seen = monitor_->after_step(result.num_targets > 0 ? engine_->schedule() : Schedule{});
    keep_timeline(seen);
    report_ = std::move(seen.report);
    if (seen.trace) log_.info("trace of step {}: {}", state_.global_step, seen.trace->string());
  } catch (const FileError& error) {
    log_.warning("{}; the run goes on without it", error.what());
  }
}

void Trainer::log_alarms() const {
  if (!report_ || !wants_report(state_.global_step)) return;
  for (const std::string& alarm : alarms_of(*report_, rates_)) {
    log_.warning("step {}: {}", state_.global_step, alarm);
  }
}

std::optional<double> Trainer::mfu(const StepResult& result, double seconds) const {
  const std::optional<double> peak = peak_flops(device_.description(), config_.run.compute_dtype);
  if (!peak || result.num_targets == 0) return {};
  return model_flops(engine_->schedule()) / seconds / *peak;
}

void Trainer::log_lines(std::string_view subject, std::string_view text) const {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    log_.info("{}: {}", subject, text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

StepResult Trainer::step() {
  const RunConfig& run = config_.run;
  const auto start = std::chrono::steady_clock::now();
  const io::StepRows wanted = order_->step(state_.global_step);
  std::vector<TokenRow> rows;
  for (const std::int64_t row : wanted.rows) rows.push_back(dataset_->row(row));

  const std::int64_t next = state_.global_step + 1;
  monitor_->before_step(next, wants_report(next) || next == timeline_step_);
  const double learning_rate = schedule_->at(state_.global_step);
  StepResult result = engine_->train_step(rows, {.adamw = {.learning_rate = learning_rate,
                                                           .beta1 = run.adam_beta1,
                                                           .beta2 = run.adam_beta2,
                                                           .eps = run.adam_epsilon,
                                                           .weight_decay = run.weight_decay,
                                                           .step = state_.applied_steps + 1},
                                                 .max_grad_norm = run.max_grad_norm});
  ++state_.global_step;
  look_at_step(result);
  state_.tokens_seen += result.num_tokens;
  left_out_.clear();
  if (result.num_targets == 0) {
    left_out_ = "no target";
  } else if (!result.applied) {
    left_out_ =
        fmt::format("loss {} and gradient norm {} are not finite in fp32", result.loss, result.grad_norm);
  } else if (left_out_ = leave_out_outlier(result); !left_out_.empty()) {
    result.applied = false;
  }
  if (result.applied) ++state_.applied_steps;
  if (result.applied) {
    state_.skipped_in_row = 0;
  } else if (result.num_targets > 0) {
    ++state_.skipped_in_row;
  }

  const double epoch = static_cast<double>(wanted.epoch) + static_cast<double>(wanted.step_in_epoch + 1) /
                                                               static_cast<double>(order_->steps_per_epoch());
  metrics_->write(state_.global_step, {{"epoch", epoch},
                                       {"loss", result.loss},
                                       {"grad_norm", result.grad_norm},
                                       {"learning_rate", learning_rate},
                                       {"num_tokens", result.num_tokens},
                                       {"num_targets", result.num_targets},
                                       {"applied", result.applied},
                                       {"seconds", seconds_since(start)}});
  return result;
}

/// Drops the step's update if the step stands out. @return why; empty if it does not
std::string Trainer::leave_out_outlier(const StepResult& result) {
  const RunConfig& run = config_.run;
  std::string why;
  const auto look = [&](std::string_view key, double threshold, std::string_view name, double value,
                        RecentValues& recent) {
    if (threshold == 0.0) return;
    const std::optional<double> zscore = recent.zscore(value);
    recent.add(value);
    if (!zscore || *zscore <= threshold) return;
    why +=
        fmt::format("{}{} {} lies {:.1f} standard deviations above the last {} ({}: {})",
                    why.empty() ? "" : " and ", name, value, *zscore, RecentValues::window, key, threshold);
  };
  look("skip_loss_zscore", run.skip_loss_zscore, "loss", result.loss, state_.recent_losses);
  look("skip_grad_norm_zscore", run.skip_grad_norm_zscore, "gradient norm", result.grad_norm,
       state_.recent_grad_norms);
  if (!why.empty()) engine_->drop_pending();
  return why;
}

std::filesystem::path Trainer::save() {
  try {
    const std::filesystem::path path = write_checkpoint();
    write_record();
    return path;
  } catch (const FileError& error) {
    throw Error(
        fmt::format("the checkpoint of step {} could not be written, earlier ones are as they were: {}",
                    state_.global_step, error.what()));
  }
}

std::filesystem::path Trainer::write_checkpoint() {
  if (engine_) {
    engine_->apply_pending();
    return write_checkpoint(std::as_const(*engine_).parameters());
  }
  const ModelLayout layout = make_layout(spec_, config_.run.frozen_parameters);
  Ledger uncounted;
  Arena memory(Space::host, state_memory_->data(), state_memory_->bytes(), uncounted);
  return write_checkpoint(ParameterStore(layout, memory));
}

std::filesystem::path Trainer::write_checkpoint(const ParameterStore& store) {
  const RunConfig& run = config_.run;
  Heartbeat heartbeat(log_, "saving a checkpoint");
  note_checkpoint();
  const CheckpointExtras extras{.config_json = model_config_.text,
                                .run_yaml = config_yaml(run),
                                .companions = run.model_name_or_path.empty()
                                                  ? std::vector<std::filesystem::path>{}
                                                  : companion_files(run.model_name_or_path)};
  const std::filesystem::path path =
      save_checkpoint(run.output_dir, store, state_, extras, std::make_shared<io::FileSystem>(),
                      [&](int done, int total) { heartbeat.set_done(done, total); });
  const std::optional<std::int64_t> best = link_best_checkpoint();
  io::prune(run.output_dir, retention(), state_.global_step);
  log_.info("saved {}{}", path.string(), best == state_.global_step ? ", the best so far" : "");
  return path;
}

TrainingEnd Trainer::run() {
  const RunConfig& run = config_.run;
  Progress progress(state_.global_step, total_steps_);
  Heartbeat heartbeat(log_, "training");
  const struct WindowEnd {
    StepMonitor& monitor;
    ~WindowEnd() { monitor.close_window(); }
  } window_end{*monitor_};
  TrainingEnd end{.global_step = state_.global_step, .last_loss = 0.0, .checkpoint = {}};
  bool saved = false;
  // Of a step whose evaluation an earlier process had no time for.
  if (evaluate_if_due() && state_.global_step > 0) {
    end.checkpoint = save();
    saved = true;
  }
  while (!done() && !stop_.requested()) {
    replan_if_asked();
    if (stop_.requested()) break;
    if (state_.global_step == end.global_step) log_.info("step {} begins", state_.global_step + 1);
    const double learning_rate = schedule_->at(state_.global_step);
    const auto start = std::chrono::steady_clock::now();
    const StepResult result = step();
    const double seconds = seconds_since(start);
    progress.step_done(result.num_tokens, seconds);
    end.last_loss = result.loss;
    saved = false;
    if (!result.applied && result.num_targets == 0) {
      log_.warning("step {}: {}; nothing was changed", state_.global_step, left_out_);
    } else if (!result.applied) {
      log_.warning("step {}: {}; nothing was changed ({} such steps in a row, {} end the run)",
                   state_.global_step, left_out_, state_.skipped_in_row, run.max_skipped_steps);
      if (state_.skipped_in_row >= run.max_skipped_steps) {
        throw Error(
            fmt::format(
                "{} steps in a row were left out, the last one because {}; checkpoints in {} are as "
                "they were. Resume "
                "from the last good one with a lower learning_rate, or look at the data of these steps",
                state_.skipped_in_row, left_out_, run.output_dir),
            exit_code::not_finite);
      }
    }
    if (state_.global_step % run.logging_steps == 0 || done()) {
      log_.info("{}", progress.line({.loss = result.loss,
                                     .grad_norm = result.grad_norm,
                                     .learning_rate = learning_rate,
                                     .mfu = mfu(result, seconds)}));
    }
    log_alarms();
    evaluate_if_due();
    if (checkpoint_is_due()) {
      end.checkpoint = save();
      saved = true;
    }
  }
  monitor_->close_window();  // a checkpoint is no part of it
  if (stops_early()) {
    log_.info("early stop: {} evaluations in a row without a loss lower by more than {}",
              state_.evaluation.without_gain, run.early_stopping_threshold);
  }
  end.interrupted = !done() || evaluation_is_due();  // a stop may have cut the last one short
  if (!saved && state_.global_step > end.global_step) end.checkpoint = save();
  if (end.interrupted) {
    log_.warning("{} received: stopped after step {}; {}", stop_.signal_name(), state_.global_step,
                 end.checkpoint.empty() ? "no step was done, nothing to save"
                                        : "run again with resume_from_checkpoint: auto");
  }
  end.global_step = state_.global_step;
  if (const auto& best = state_.evaluation.best_checkpoint) {
    const bool is_known = best->loss < std::numeric_limits<double>::max();
    log_.info("best checkpoint: {}{}", (std::filesystem::path(run.output_dir) / io::best_name).string(),
              is_known ? fmt::format(", eval loss {:.4f}", best->loss) : ", of other held-out rows");
  }
  return end;
}

}  // namespace layerstream
