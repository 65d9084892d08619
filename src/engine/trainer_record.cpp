// What a run leaves for `layerstream report`.
#include "engine/run_record.hpp"
#include "engine/timeline.hpp"
#include "engine/trainer.hpp"
#include "io/file_sink.hpp"

namespace layerstream {
namespace {

/// Steps of a process, or of a placement, until one is typical: the first makes plans of new shapes, and has
/// no update of a step before it.
constexpr std::int64_t steps_until_typical = 3;

}  // namespace

void Trainer::expect_timeline() {
  timeline_step_ = std::min(state_.global_step + steps_until_typical, total_steps_);
}

/// @param seen of the step that was done last.
void Trainer::keep_timeline(const StepMonitor::Seen& seen) {
  if (state_.global_step != timeline_step_) return;
  if (!seen.report) {  // nothing ran
    ++timeline_step_;
    return;
  }
  leave("timeline.json", timeline_json(engine_->schedule(), seen.times, *seen.report));
  write_record();  // memory has been where it peaks
}

void Trainer::write_record() {
  if (!engine_) return;
  leave("run.json", RunRecord{.config = config_,
                              .placed = placement_.run,
                              .model_path = model_config_.path,
                              .spec = spec_,
                              .engine = *engine_,
                              .device = device_,
                              .rates = rates_,
                              .planned = placement_.planned,
                              .total_steps = total_steps_,
                              .first_step = first_step_,
                              .rows_per_step = state_.rows_per_step,
                              .num_rows = dataset_->num_rows()}
                        .to_json());
}

/// A file of the output directory that the run can do without.
void Trainer::leave(std::string_view name, const std::string& text) const {
  try {
    io::replace_file(std::make_shared<io::FileSystem>(), std::filesystem::path(config_.run.output_dir) / name,
                     text);
  } catch (const FileError& error) {
    log_.warning("{}; the run goes on without it", error.what());
  }
}

}  // namespace layerstream
