// Evaluation on held-out data, and what follows from it.
#include <chrono>
#include <cmath>
#include <limits>

#include "core/progress.hpp"
#include "engine/trainer.hpp"

namespace layerstream {
namespace {

constexpr std::string_view phase = "evaluating";

}  // namespace

std::int64_t Trainer::evaluation_rows() const {
  if (!held_out_) return 0;
  const std::int64_t wanted = config_.run.max_eval_samples;
  return wanted > 0 ? std::min(wanted, held_out_->num_rows()) : held_out_->num_rows();
}

bool Trainer::stops_early() const {
  const std::int64_t patience = config_.run.early_stopping_patience;
  return patience > 0 && state_.evaluation.without_gain >= patience;
}

bool Trainer::is_epoch_end() const {
  return state_.global_step > 0 && state_.global_step % order_->steps_per_epoch() == 0;
}

bool Trainer::evaluation_is_due() const {
  const RunConfig& run = config_.run;
  if (!held_out_) return false;
  if (state_.evaluation.last && state_.evaluation.last->step == state_.global_step) return false;
  if (state_.global_step == 0) return run.eval_on_start;
  if (run.eval_strategy == EvalStrategy::no) return false;
  if (state_.global_step >= total_steps_) return true;
  return run.eval_strategy == EvalStrategy::epoch ? is_epoch_end() : state_.global_step % run.eval_steps == 0;
}

std::optional<double> Trainer::held_out_loss() {
  Heartbeat heartbeat(log_, std::string(phase));
  const std::int64_t num_rows = evaluation_rows();
  double nll = 0.0;
  std::int64_t targets = 0;
  std::vector<TokenRow> rows;
  for (std::int64_t first = 0; first < num_rows; first += state_.rows_per_step) {
    if (stop_.requested()) return {};
    heartbeat.set_done(static_cast<double>(first), static_cast<double>(num_rows));
    rows.clear();
    for (std::int64_t row = first; row < std::min(first + state_.rows_per_step, num_rows); ++row) {
      rows.push_back(held_out_->row(row));
      targets += held_out_->row_targets(row);
    }
    nll += engine_->evaluate(rows);
  }
  return nll / static_cast<double>(targets);
}

bool Trainer::evaluate_if_due() {
  if (!evaluation_is_due()) return false;
  const auto start = std::chrono::steady_clock::now();
  const std::optional<double> loss = held_out_loss();
  if (!loss) {
    log_.warning("{} received: the evaluation of step {} is left out; a resume begins with it",
                 stop_.signal_name(), state_.global_step);
    return false;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  adopt_evaluation(*loss);
  const std::optional<EvaluatedStep>& best = state_.evaluation.best;
  std::string standing = "no best yet: the loss is not finite";
  if (best) {
    standing = best->step == state_.global_step
                   ? "the best so far"
                   : fmt::format("best {:.4f} at step {}", best->loss, best->step);
  }
  log_.info("step {}  eval loss {:.4f}  perplexity {:.2f}  {} rows, {:.1f}s  {}", state_.global_step, *loss,
            std::exp(*loss), evaluation_rows(), seconds, standing);
  metrics_->write(state_.global_step, {{"eval_loss", *loss},
                                       {"eval_perplexity", std::exp(*loss)},
                                       {"eval_rows", evaluation_rows()},
                                       {"eval_seconds", seconds}});
  return true;
}

/// As EarlyStoppingCallback of transformers: a gain is measured against the best loss before.
void Trainer::adopt_evaluation(double loss) {
  const RunConfig& run = config_.run;
  EvaluationState& evaluation = state_.evaluation;
  evaluation.last = {.step = state_.global_step, .loss = loss};
  const bool gains = std::isfinite(loss) &&
                     (!evaluation.best || loss < evaluation.best->loss - run.early_stopping_threshold);
  if (std::isfinite(loss) && (!evaluation.best || loss < evaluation.best->loss)) {
    evaluation.best = evaluation.last;
  }
  evaluation.without_gain = gains ? 0 : evaluation.without_gain + 1;
}

void Trainer::check_same_held_out_data() {
  if (!held_out_) return;
  EvaluationState& evaluation = state_.evaluation;
  const bool is_same =
      evaluation.data_hash == held_out_->content_hash() && evaluation.num_rows == evaluation_rows();
  if (evaluation.last && !is_same) {
    const std::optional<EvaluatedStep> best_checkpoint = evaluation.best_checkpoint;
    log_.warning(
        "the held-out rows (validation_file or eval_dataset, max_eval_samples, cutoff_len, packing, overlong) are not "
        "those of the checkpoint: its evaluations are forgotten, and the best begins anew");
    evaluation = EvaluationState{};
    // It stays until there is another one, which any is better than.
    evaluation.best_checkpoint = best_checkpoint;
    if (evaluation.best_checkpoint) evaluation.best_checkpoint->loss = std::numeric_limits<double>::max();
  }
  evaluation.data_hash = held_out_->content_hash();
  evaluation.num_rows = evaluation_rows();
}

}  // namespace layerstream
