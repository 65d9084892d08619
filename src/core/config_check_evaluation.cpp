#include <algorithm>

#include "core/config_namer.hpp"

namespace layerstream {

void check_evaluation(const RunConfig& run, const Namer& name, ConfigProblems& problems) {
  const bool has_data = !run.validation_file.empty() || !run.eval_dataset.empty();
  const bool evaluates = run.eval_strategy != EvalStrategy::no;
  const auto needs_data = [&](std::string_view key) {
    problems.add("{} needs held-out data: set validation_file or eval_dataset", name(key));
  };
  if (evaluates && !has_data) needs_data("eval_strategy");
  if (run.eval_on_start && !has_data) needs_data("eval_on_start");
  if (has_data && !evaluates && !run.eval_on_start) {
    problems.add("{} is never used with {}; set eval_strategy: steps or epoch, or drop it",
                 name(run.validation_file.empty() ? "eval_dataset" : "validation_file"),
                 name("eval_strategy"));
  }
  const auto needs_evaluation = [&](std::string_view key) {
    problems.add("{} needs evaluations, and {}; set eval_strategy: steps or epoch", name(key),
                 name("eval_strategy"));
  };
  if (!evaluates && run.save_strategy == SaveStrategy::best) needs_evaluation("save_strategy");
  if (!evaluates && run.early_stopping_patience > 0) needs_evaluation("early_stopping_patience");
  if (run.early_stopping_threshold > 0 && run.early_stopping_patience == 0) {
    problems.add("{} means nothing with {}; drop it, or set a patience of 1 or more",
                 name("early_stopping_threshold"), name("early_stopping_patience"));
  }
  const auto needs_deferred = [&](std::string_view key, double value) {
    if (value == 0 || run.optimizer_update == OptimizerUpdate::deferred) return;
    problems.add("{} needs optimizer_update: deferred, as with {} blocks have moved when the step is judged",
                 name(key), name("optimizer_update"));
  };
  needs_deferred("skip_loss_zscore", run.skip_loss_zscore);
  needs_deferred("skip_grad_norm_zscore", run.skip_grad_norm_zscore);
  for (const std::string& report : run.report_to) {
    if (report == "csv" || report == "tensorboard" || report == "none") continue;
    problems.add("{}: \"{}\" is not known; csv and tensorboard are, and none", name("report_to"), report);
  }
}

}  // namespace layerstream
