#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "backends/device.hpp"
#include "core/config.hpp"
#include "core/log.hpp"
#include "core/signals.hpp"
#include "engine/checkpoint_io.hpp"
#include "engine/checkpoint_keeper.hpp"
#include "engine/engine.hpp"
#include "engine/lr_schedule.hpp"
#include "engine/replan.hpp"
#include "engine/run_record.hpp"
#include "engine/step_monitor.hpp"
#include "io/dataset.hpp"
#include "io/dataset_preparation.hpp"
#include "io/run_metrics.hpp"
#include "io/sampler.hpp"
#include "model/hf_config.hpp"

namespace layerstream {

/// How a run ended.
struct TrainingEnd {
  std::int64_t global_step = 0;
  double last_loss = 0.0;
  std::filesystem::path checkpoint;  ///< the last one written; empty if none
  bool interrupted = false;          ///< by a signal, after a checkpoint
};

/// A training run: reads, refuses what cannot work, trains, logs, saves and resumes.
class Trainer {
 public:
  /// Does all reading and checking, and allocates; step 0 has not begun when it returns. Polls `stop`
  /// between pieces of work and throws Interrupted.
  /// @param device, stop outlive the trainer. @param annotation sees the steps of the profile window, or all
  /// without one; outlives the trainer.
  Trainer(const LoadedConfig& config, Device& device, const StopRequest& stop, const Log& log,
          const EngineDiagnostics& diagnostics = {}, ExecutionObserver* annotation = nullptr);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// From where the run stands to its end, or to a stop request, which leaves a checkpoint.
  /// Throws Error with exit_code::not_finite after max_skipped_steps skipped steps in a row.
  TrainingEnd run();

  /// One optimizer step. @pre not done().
  StepResult step();
  /// All steps are taken, or evaluations have ended the run.
  bool done() const { return state_.global_step >= total_steps_ || stops_early(); }
  /// Measures the held-out loss if eval_strategy says so at this step and it was not done yet. @return
  /// whether it was measured; a stop request cuts it short.
  bool evaluate_if_due();
  /// Writes a checkpoint of the present state and applies save_total_limit.
  std::filesystem::path save();
  /// Looks for a request for another placement (see ReplanRequests) and carries it out, or logs why not; what
  /// comes after is the same bit for bit. Throws Error if there is no engine any more: the run is over then,
  /// with a checkpoint if one could be written. A stop request meanwhile may leave no engine either, but for
  /// save().
  void replan_if_asked();

  Engine& engine() { return *engine_; }
  const io::Dataset& dataset() const { return *dataset_; }
  const TrainerState& state() const { return state_; }
  std::int64_t total_steps() const { return total_steps_; }

 private:
  /// Where weights come from; neither: fresh ones.
  struct WeightSource {
    std::optional<io::CheckpointReader> checkpoint;
    std::optional<io::ModelFiles> model;
  };

  /// A configuration with every placement decided, and, where there are rates to predict it from, a step.
  struct Placement {
    RunConfig run;
    std::optional<PlannedStep> planned;
  };

  WeightSource open_weights() const;
  void verify(const io::CheckpointReader& checkpoint) const;
  Placement placement_of(const RunConfig& run, std::size_t data_bytes, std::size_t engine_bytes) const;
  std::unique_ptr<Engine> make_engine(const RunConfig& placed, const std::shared_ptr<HostRegion>& state);
  void await_requests();
  void carry_out(const std::string& request);
  std::string move_to(const RunConfig& placed, std::size_t former_limit);
  [[noreturn]] void end_without_engine(std::string_view why);
  void settle(ReplanRequests::Outcome outcome);
  void read_data();
  void plan_steps();
  io::Dataset load_data(io::DataRole role);
  std::vector<std::string> prepared_inputs(io::DataRole role, std::string_view subject,
                                           const std::string& phase);
  std::int64_t evaluation_rows() const;
  /// Whether early_stopping_patience is at its end.
  bool stops_early() const;
  bool is_epoch_end() const;
  bool evaluation_is_due() const;
  /// Mean over the held-out targets; nothing if a stop was requested.
  std::optional<double> held_out_loss();
  void adopt_evaluation(double loss);
  void check_same_held_out_data();
  std::string leave_out_outlier(const StepResult& result);
  std::size_t data_bytes() const { return dataset_->bytes() + (held_out_ ? held_out_->bytes() : 0); }
  void expect_timeline();
  void keep_timeline(const StepMonitor::Seen& seen);
  void write_record();
  void leave(std::string_view name, const std::string& text) const;
  void measure_rates();
  bool wants_report(std::int64_t step) const;
  void look_at_step(const StepResult& result);
  void log_alarms() const;
  std::optional<double> mfu(const StepResult& result, double seconds) const;
  void adopt_state(const io::CheckpointReader& checkpoint);
  void load_state(const WeightSource& source);
  void log_banner() const;
  void log_placement() const;
  /// A line of the log for each line of `text`.
  void log_lines(std::string_view subject, std::string_view text) const;

  LoadedConfig config_;
  Placement placement_;  ///< that the run has
  Device& device_;
  const StopRequest& stop_;
  Log log_;
  HfConfigText model_config_;
  CheckpointKeeper checkpoints_;
  ModelSpec spec_;
  std::optional<io::Dataset> dataset_;
  std::optional<io::Dataset> held_out_;
  std::unique_ptr<io::DataOrder> order_;
  std::unique_ptr<LrSchedule> schedule_;
  std::unique_ptr<StepMonitor> monitor_;
  EngineDiagnostics diagnostics_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<HostRegion> state_memory_;  ///< what there is of an engine while it is taken apart
  std::optional<ReplanRequests> requests_;
  MeasuredRates rates_;
  std::optional<StepReport> report_;  ///< of the last step
  std::int64_t timeline_step_ = 0;    ///< the step that timeline.json is to be of
  std::unique_ptr<io::RunMetrics> metrics_;
  TrainerState state_;
  std::string left_out_;  ///< why the last step changed nothing; empty if it did
  std::int64_t total_steps_ = 0;
  std::int64_t first_step_ = 0;  ///< steps done before this run
};

/// The model that the configuration names: model_name_or_path, or config_name for fresh weights.
HfConfigText model_config_of(const RunConfig& run);

/// What to tell whose rows are longer than the model's rotary embedding reaches; else empty.
std::string long_row_warning(const ModelSpec& spec, std::int64_t row_tokens);

/// That the run's attention is not the model's; empty if it is.
std::string attention_pattern_warning(const RunConfig& run);

/// What to tell whose plain text would become byte tokens of a model with a tokenizer of its own; else empty.
std::string byte_token_warning(const RunConfig& run, const io::DatasetReport& report);

}  // namespace layerstream
