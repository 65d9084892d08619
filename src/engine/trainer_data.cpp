// The rows that a run is of, and so its steps.
#include <cmath>

#include "core/progress.hpp"
#include "engine/trainer.hpp"

namespace layerstream {

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

}  // namespace layerstream
