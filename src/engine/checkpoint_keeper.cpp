#include "engine/checkpoint_keeper.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>

#include "core/config.hpp"
#include "core/progress.hpp"
#include "engine/checkpoint_io.hpp"
#include "io/checkpoint_names.hpp"
#include "io/dataset_preparation.hpp"

namespace layerstream {
namespace {

/// Steps from one checkpoint to the next that the keys ask for; 0: there is only that of the end. Of the best
/// ones each evaluation may be one.
std::int64_t steps_between_saves(const RunConfig& run, std::int64_t steps_per_epoch) {
  switch (run.save_strategy) {
    case SaveStrategy::no:
      return 0;
    case SaveStrategy::steps:
      return run.save_steps;
    case SaveStrategy::epoch:
      return steps_per_epoch;
    case SaveStrategy::best:
      return run.eval_strategy == EvalStrategy::epoch ? steps_per_epoch : run.eval_steps;
  }
  return 0;
}

/// Notes that there is about to be a checkpoint of the present step, which may be the best one.
void note_checkpoint(TrainerState& state) {
  EvaluationState& evaluation = state.evaluation;
  const std::optional<EvaluatedStep>& last = evaluation.last;
  if (!last || last->step != state.global_step || !std::isfinite(last->loss)) return;
  if (!evaluation.best_checkpoint || last->loss < evaluation.best_checkpoint->loss) {
    evaluation.best_checkpoint = last;
  }
}

}  // namespace

CheckpointKeeper::CheckpointKeeper(const RunConfig& run, const std::string& config_json, const Log& log,
                                   std::shared_ptr<io::FileSystem> files)
    : run_(run), config_json_(config_json), log_(log), files_(std::move(files)) {}

void CheckpointKeeper::check_there_is_none() const {
  std::vector<std::string> passed_over;
  const std::vector<io::FoundCheckpoint> complete = io::find_checkpoints(run_.output_dir, &passed_over);
  for (const std::string& reason : passed_over) log_.warning("{}", reason);
  if (!complete.empty()) {
    throw ConfigError(
        fmt::format("output_dir {} holds {} of another run; continue it with resume_from_checkpoint: auto, "
                    "or choose another output_dir",
                    run_.output_dir, complete.back().path.filename().string()));
  }
  if (!passed_over.empty()) {
    throw ConfigError(
        fmt::format("output_dir {} holds checkpoints, but none that is complete (see the warnings); repair "
                    "them, or choose another output_dir",
                    run_.output_dir));
  }
}

void CheckpointKeeper::check_there_is_none_after(std::int64_t step) const {
  const std::optional<io::FoundCheckpoint> newest = io::newest_complete(run_.output_dir);
  if (!newest || newest->step <= step) return;
  throw ConfigError(
      fmt::format("resume_from_checkpoint: {} is at step {}, but output_dir {} holds {}, which a later "
                  "resume would take instead; choose another output_dir, or move the later checkpoints away",
                  run_.resume_from_checkpoint, step, run_.output_dir, newest->path.filename().string()));
}

void CheckpointKeeper::forget_absent_best(EvaluationState& evaluation) const {
  if (!evaluation.best_checkpoint) return;
  const std::int64_t step = evaluation.best_checkpoint->step;
  std::vector<std::string> passed_over;
  const std::vector<io::FoundCheckpoint> found = io::find_checkpoints(run_.output_dir, &passed_over);
  if (std::ranges::find(found, step, &io::FoundCheckpoint::step) != found.end()) return;
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::path(run_.output_dir) / io::checkpoint_name(step), error) ||
      error) {
    for (const std::string& reason : passed_over) log_.warning("{}", reason);
    log_.warning("the best checkpoint, of step {}, cannot be read now; it stays the best", step);
    return;
  }
  log_.warning(
      "the best checkpoint, of step {}, is not in output_dir {}: the best of those saved there counts", step,
      run_.output_dir);
  evaluation.best_checkpoint.reset();
}

void CheckpointKeeper::check_disk_space(const TrainerState& state, const RunLength& length,
                                        std::uint64_t checkpoint_bytes) const {
  const auto multiples_to_come = [&](std::int64_t of) {
    return of > 0 ? length.total_steps / of - state.global_step / of : 0;
  };
  const std::int64_t every = steps_between_saves(run_, length.steps_per_epoch);
  const bool end_is_one = every > 0 && length.total_steps % every == 0;
  const std::int64_t saves = multiples_to_come(every) + (end_is_one ? 0 : 1);
  // Kept beside those of the limit: the best, and the major ones.
  std::int64_t beside = 0;
  if (run_.save_total_limit > 0) {
    const bool has_best = !io::data_key(run_, io::DataRole::held_out).empty();
    beside = (has_best ? 1 : 0) + multiples_to_come(run_.save_major_steps);
  }
  io::check_space(run_.output_dir,
                  io::required_bytes(run_.output_dir, checkpoint_bytes, retention(state), saves) +
                      checkpoint_bytes * static_cast<std::uint64_t>(std::min(beside, saves)),
                  files_);
}

bool CheckpointKeeper::is_due(const TrainerState& state, std::int64_t steps_per_epoch) const {
  if (run_.save_strategy == SaveStrategy::best) {
    return state.evaluation.best && state.evaluation.best->step == state.global_step;
  }
  const std::int64_t every = steps_between_saves(run_, steps_per_epoch);
  return every > 0 && state.global_step > 0 && state.global_step % every == 0;
}

std::filesystem::path CheckpointKeeper::save(const ParameterStore& store, TrainerState& state) const {
  Heartbeat heartbeat(log_, "saving a checkpoint");
  note_checkpoint(state);
  std::vector<std::filesystem::path> companions;
  std::filesystem::path path;
  try {
    if (!run_.model_name_or_path.empty()) companions = companion_files(run_.model_name_or_path);
    path = save_checkpoint(
        run_.output_dir, store, state,
        {.config_json = config_json_, .run_yaml = config_yaml(run_), .companions = companions}, files_,
        [&](int done, int total) { heartbeat.set_done(done, total); });
  } catch (const FileError& error) {
    throw Error(
        fmt::format("the checkpoint of step {} could not be written, earlier ones are as they were: {}",
                    state.global_step, error.what()));
  }
  tidy(state);
  const bool is_best = retention(state).best == state.global_step;
  log_.info("saved {}{}", path.string(), is_best ? ", the best so far" : "");
  return path;
}

io::Retention CheckpointKeeper::retention(const TrainerState& state) const {
  io::Retention retention{.limit = run_.save_total_limit, .major_steps = run_.save_major_steps};
  if (const auto& best = state.evaluation.best_checkpoint) retention.best = best->step;
  return retention;
}

/// The checkpoint is there: what fails now is no reason to end the run.
void CheckpointKeeper::tidy(const TrainerState& state) const {
  const io::Retention wanted = retention(state);
  try {
    io::link_best(run_.output_dir, wanted.best, files_);
  } catch (const FileError& error) {
    log_.warning("{}; the best checkpoint is the one of step {}", error.what(), wanted.best.value_or(0));
  }
  try {
    io::prune(run_.output_dir, wanted, state.global_step, files_);
  } catch (const FileError& error) {
    log_.warning("{}; checkpoints beyond save_total_limit are left, and the next save tries again",
                 error.what());
  }
}

}  // namespace layerstream
