#include "engine/trainer.hpp"

#include <chrono>
#include <cmath>

#include "core/affinity.hpp"
#include "core/progress.hpp"
#include "io/byte_tokenizer.hpp"

namespace layerstream {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

HfConfigText model_config_of(const RunConfig& run) {
  return read_hf_config(run.model_name_or_path.empty() ? run.config_name : run.model_name_or_path);
}

Trainer::Trainer(const LoadedConfig& config, Device& device, const StopRequest& stop, const Log& log,
                 const EngineDiagnostics& diagnostics)
    : config_(config), device_(device), stop_(stop), log_(log) {
  const RunConfig& run = config_.run;
  check_config(config_);
  require_keys(config_, {"train_file", "output_dir"}, "train");
  for (const std::string& warning : thread_warnings(probe_cpus(), OpenMpSettings::of_this_process())) {
    log_.warning("{}", warning);
  }
  model_config_ = model_config_of(run);
  spec_ = parse_hf_config(model_config_.text, model_config_.path);
  const std::optional<std::filesystem::path> resume_point =
      run.resume_from_checkpoint.empty() ? std::nullopt : find_resume_point(run.resume_from_checkpoint, run.output_dir);
  check_output_directory(resume_point);

  {
    Heartbeat heartbeat(log_, "reading the training data");
    dataset_ = io::Dataset::load(io::dataset_options(run, spec_.vocab_size));
  }
  log_.info("data: {}", dataset_->report().to_text());
  stop_.throw_if_requested("reading the training data");
  plan_steps();
  check_disk_space();
  io::FileSystem files;
  io::create_directories(files, run.output_dir);

  {
    Heartbeat heartbeat(log_, "allocating memory");
    engine_ = std::make_unique<Engine>(spec_, run, EngineMode::train, device_, diagnostics);
  }
  log_banner();
  load_state(resume_point);
  metrics_ = std::make_unique<io::MetricsWriter>(std::filesystem::path(run.output_dir) / "metrics.jsonl",
                                                 state_.global_step);
}

void Trainer::plan_steps() {
  const RunConfig& run = config_.run;
  state_.seed = run.seed;
  state_.rows_per_step = run.per_device_train_batch_size * run.gradient_accumulation_steps;
  state_.data_hash = dataset_->content_hash();
  order_ = std::make_unique<io::DataOrder>(dataset_->num_rows(), state_.rows_per_step, run.seed);
  total_steps_ = run.max_steps > 0
                     ? run.max_steps
                     : static_cast<std::int64_t>(
                           std::ceil(run.num_train_epochs * static_cast<double>(order_->steps_per_epoch())));
  schedule_ = std::make_unique<LrSchedule>(LrSchedule::of(run, total_steps_));
}

void Trainer::check_output_directory(const std::optional<std::filesystem::path>& resume_point) const {
  if (resume_point) return;
  const RunConfig& run = config_.run;
  const std::optional<io::FoundCheckpoint> existing = io::newest_complete(run.output_dir);
  if (!existing) return;
  throw ConfigError(fmt::format(
      "output_dir {} holds {} of another run; continue it with resume_from_checkpoint: auto, or choose another "
      "output_dir",
      run.output_dir, existing->path.filename().string()));
}

void Trainer::check_disk_space() const {
  const RunConfig& run = config_.run;
  const std::int64_t saves = run.save_steps > 0 ? total_steps_ / run.save_steps + 1 : 1;
  io::check_space(run.output_dir, io::required_bytes(run.output_dir, checkpoint_bytes(make_layout(spec_)),
                                                     run.save_total_limit, saves));
}

void Trainer::check_same_run(const TrainerState& saved, const std::filesystem::path& place) const {
  const auto require = [&](std::string_view what, auto in_checkpoint, auto now) {
    if (in_checkpoint == now) return;
    throw ConfigError(fmt::format("{}: {} was {} and is {} now, so the run would not continue where it stopped; set it "
                                  "back, or start a new run with model_name_or_path from an export",
                                  place.string(), what, in_checkpoint, now));
  };
  require("seed", saved.seed, state_.seed);
  require("per_device_train_batch_size x gradient_accumulation_steps", saved.rows_per_step, state_.rows_per_step);
  require("the content of the training data (train_file, cutoff_len, packing, overlong)", saved.data_hash,
          state_.data_hash);
}

void Trainer::load_state(const std::optional<std::filesystem::path>& resume_point) {
  const RunConfig& run = config_.run;
  Heartbeat heartbeat(log_, "loading weights");
  const auto poll = [&](int done, int total) {
    stop_.throw_if_requested("loading weights");
    heartbeat.set_done(done, total);
  };
  if (resume_point) {
    const io::CheckpointReader checkpoint(*resume_point);
    const TrainerState saved = read_trainer_state(checkpoint);
    check_same_run(saved, *resume_point);
    load_checkpoint(checkpoint, engine_->parameters(), poll);
    state_ = saved;
    log_.info("resumed {} at step {} of {}", resume_point->string(), state_.global_step, total_steps_);
  } else if (!run.model_name_or_path.empty()) {
    load_weights(io::ModelFiles(run.model_name_or_path), engine_->parameters(), poll);
    log_.info("weights of {}", run.model_name_or_path);
  } else {
    engine_->parameters().initialize(run.seed, spec_.initializer_range, engine_->pool());
    log_.info("fresh weights: normal, standard deviation {}, seed {}", spec_.initializer_range, run.seed);
  }
}

void Trainer::log_banner() const {
  const RunConfig& run = config_.run;
  const EngineShape& shape = engine_->shape();
  log_.info("model: {} parameters, {} layers, hidden {}, vocabulary {}, {}", shape.layout.num_parameters(),
            spec_.num_hidden_layers, spec_.hidden_size, spec_.vocab_size,
            spec_.tie_word_embeddings ? "tied embeddings" : "untied embeddings");
  log_.info("numbers: {} compute, fp32 master, moments and gradients; AdamW on {} with {} threads", name_of(shape.compute),
            ops::adamw_host_target(), engine_->pool().num_threads());
  log_.info("device: {}; backend {}, {} weight slots", device_.description(), engine_->backend().name(),
            shape.schedule.weight_slots);
  log_.info("steps: {} of {} rows ({} rows an epoch); chunks of up to {} tokens", total_steps_, state_.rows_per_step,
            dataset_->num_rows(), shape.bounds.chunk_tokens);
  log_.info("memory:\n{}", engine_->ledger().to_table());
  log_.info("output: {}", run.output_dir);
}

StepResult Trainer::step() {
  const RunConfig& run = config_.run;
  const auto start = std::chrono::steady_clock::now();
  const io::StepRows wanted = order_->step(state_.global_step);
  std::vector<TokenRow> rows;
  for (const std::int64_t row : wanted.rows) rows.push_back(dataset_->row(row));

  const double learning_rate = schedule_->at(state_.global_step);
  const StepResult result = engine_->train_step(rows, {.adamw = {.learning_rate = learning_rate,
                                                                 .beta1 = run.adam_beta1,
                                                                 .beta2 = run.adam_beta2,
                                                                 .eps = run.adam_epsilon,
                                                                 .weight_decay = run.weight_decay,
                                                                 .step = state_.applied_steps + 1},
                                                       .max_grad_norm = run.max_grad_norm});
  ++state_.global_step;
  state_.tokens_seen += result.num_tokens;
  if (result.applied) ++state_.applied_steps;
  state_.skipped_in_row = result.applied ? 0 : state_.skipped_in_row + 1;

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

std::filesystem::path Trainer::save() {
  const RunConfig& run = config_.run;
  engine_->apply_pending();
  Heartbeat heartbeat(log_, "saving a checkpoint");
  const CheckpointExtras extras{
      .config_json = model_config_.text,
      .run_yaml = config_yaml(run),
      .companions = run.model_name_or_path.empty() ? std::vector<std::filesystem::path>{}
                                                   : companion_files(run.model_name_or_path)};
  const std::filesystem::path path =
      save_checkpoint(run.output_dir, engine_->parameters(), state_, extras, std::make_shared<io::FileSystem>(),
                      [&](int done, int total) { heartbeat.set_done(done, total); });
  if (run.save_total_limit > 0) io::prune(run.output_dir, run.save_total_limit, state_.global_step);
  log_.info("saved {}", path.string());
  return path;
}

TrainingEnd Trainer::run() {
  const RunConfig& run = config_.run;
  Progress progress(state_.global_step, total_steps_);
  Heartbeat heartbeat(log_, "training");
  TrainingEnd end{.global_step = state_.global_step, .last_loss = 0.0, .checkpoint = {}};
  bool saved = false;
  while (!done() && !stop_.requested()) {
    const double learning_rate = schedule_->at(state_.global_step);
    const auto start = std::chrono::steady_clock::now();
    const StepResult result = step();
    progress.step_done(result.num_tokens, seconds_since(start));
    end.last_loss = result.loss;
    saved = false;
    if (!result.applied) {
      log_.warning("step {}: {}; nothing was changed ({} such steps in a row, {} end the run)", state_.global_step,
                   result.num_targets == 0 ? std::string("no target")
                                           : fmt::format("loss {} or gradient norm {} is not finite", result.loss,
                                                         result.grad_norm),
                   state_.skipped_in_row, run.max_skipped_steps);
      if (state_.skipped_in_row >= run.max_skipped_steps) {
        throw Error(fmt::format("{} steps in a row had no finite gradient; the last good checkpoint is kept in {}. "
                                "Resume from it with a lower learning_rate, or look at the data of these steps",
                                state_.skipped_in_row, run.output_dir),
                    exit_code::not_finite);
      }
    }
    if (state_.global_step % run.logging_steps == 0 || done()) {
      log_.info("{}", progress.line({.loss = result.loss,
                                     .grad_norm = result.grad_norm,
                                     .learning_rate = learning_rate,
                                     .mfu = {}}));
    }
    if (run.save_steps > 0 && state_.global_step % run.save_steps == 0) {
      end.checkpoint = save();
      saved = true;
    }
  }
  end.interrupted = !done();
  if (!saved && state_.global_step > end.global_step) end.checkpoint = save();
  if (end.interrupted) {
    log_.warning("{} received: stopped after step {}; run again with resume_from_checkpoint: auto", stop_.signal_name(),
                 state_.global_step);
  }
  end.global_step = state_.global_step;
  return end;
}

}  // namespace layerstream
