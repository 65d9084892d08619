#include "engine/trainer.hpp"

#include <chrono>
#include <limits>

#include "backends/free_memory.hpp"
#include "backends/peak_rates.hpp"
#include "core/affinity.hpp"
#include "core/progress.hpp"
#include "engine/alarms.hpp"
#include "engine/planner.hpp"
#include "engine/resume_checks.hpp"

namespace layerstream {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
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
  if (run.attention_pattern.type == AttentionPatternType::full) return {};
  return fmt::format(
      "attention_pattern: with keys left out the model computes another function than with full attention, and "
      "config.json cannot say so: whoever loads an export computes full attention; layerstream generate "
      "reads the pattern from a checkpoint");
}

Trainer::Trainer(const LoadedConfig& config, Device& device, const StopRequest& stop, const Log& log,
                 const EngineDiagnostics& diagnostics, ExecutionObserver* annotation)
    : config_(config),
      device_(device),
      stop_(stop),
      log_(log),
      checkpoints_(config_.run, model_config_.text, log_),
      diagnostics_(diagnostics) {
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
  placement_ = placement_of(run, 0, 0);
  read_data();
  plan_steps();
  if (source.checkpoint) adopt_state(*source.checkpoint);
  check_same_held_out_data();
  if (shortage(plan_run(spec_, placement_.run, device_, data_bytes()).ledger,
               host_budget(run, host_node(run, device_).node), device_)
          .any()) {
    placement_ = placement_of(run, data_bytes(), 0);
  }
  config_.run.chunk_tokens = placement_.run.chunk_tokens;  // it changes sums: the run's, wherever it goes on
  if (!done()) {
    checkpoints_.check_disk_space(state_,
                                  {.total_steps = total_steps_, .steps_per_epoch = order_->steps_per_epoch()},
                                  checkpoint_bytes(make_layout(spec_, run.frozen_parameters)));
  }

  monitor_ = std::make_unique<StepMonitor>(
      device_, StepMonitor::Observers{.always = diagnostics.observer, .annotation = annotation},
      ProfileWindow{.first_step = run.profile_start_step, .num_steps = run.profile_num_steps},
      run.output_dir);
  diagnostics_.observer = &monitor_->observer();
  engine_ = make_engine(placement_.run, {});
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
    source.checkpoint.emplace(*resume_point);
    checkpoints_.check_there_is_none_after(source.checkpoint->step());
    verify(*source.checkpoint);
    check_same_model(*source.checkpoint, model_config_, spec_);
    return source;
  }
  checkpoints_.check_there_is_none();
  if (!run.model_name_or_path.empty()) {
    source.model.emplace(run.model_name_or_path);
    check_weights(*source.model, make_layout(spec_));
  }
  return source;
}

/// Reads all of it. Throws FileError if its content is not what was written.
void Trainer::verify(const io::CheckpointReader& checkpoint) const {
  const std::string place = checkpoint.directory().string();
  log_.info("verifying {}", place);
  const std::string phase = "verifying " + place;
  Heartbeat heartbeat(log_, phase);
  checkpoint.verify_hashes([&](std::uint64_t done, std::uint64_t total) {
    stop_.throw_if_requested(phase);
    heartbeat.set_done(static_cast<double>(done), static_cast<double>(total));
  });
}

/// Throws ConfigError; ResourceError if the run does not fit.
Trainer::Placement Trainer::placement_of(const RunConfig& run, std::size_t data_bytes,
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
    return {.run = plan.config,
            .planned = PlannedStep{.profile = profile->name,
                                   .seconds = plan.prediction.run.seconds,
                                   .tokens_per_second = plan.tokens_per_second()}};
  }
  if (!device_.uses_host_memory()) {
    log_.info(
        "plan: no hardware profile of this device, so placement keys that are not given have their defaults; "
        "`layerstream calibrate` measures one for hardware_profile");
  }
  const RunConfig placed = with_default_placement(run, device_);
  check_memory(plan_run(spec_, placed, device_, data_bytes, engine_bytes).ledger, host, device_);
  return {.run = placed, .planned = {}};
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

void Trainer::adopt_state(const io::CheckpointReader& checkpoint) {
  const std::filesystem::path& place = checkpoint.directory();
  const TrainerState saved = read_trainer_state(checkpoint);
  check_same_data(saved, state_, place);
  const RunConfig before = settings_of(checkpoint);
  check_moments(before.frozen_parameters, config_.run.frozen_parameters, spec_, place);
  if (const std::string changes = changed_settings(before, config_.run, spec_); !changes.empty()) {
    log_.warning("changed since {}: {}; the rest of the run will not be that of the uninterrupted one",
                 place.string(), changes);
  }
  state_ = saved;
  checkpoints_.forget_absent_best(state_.evaluation);
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
  if (engine_) {
    engine_->apply_pending();
    const std::filesystem::path path = checkpoints_.save(std::as_const(*engine_).parameters(), state_);
    write_record();
    return path;
  }
  // What a re-plan has left of an engine.
  Ledger uncounted;
  Arena memory(Space::host, state_memory_->data(), state_memory_->bytes(), uncounted);
  return checkpoints_.save(ParameterStore(make_layout(spec_, config_.run.frozen_parameters), memory), state_);
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
    if (checkpoints_.is_due(state_, order_->steps_per_epoch())) {
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
