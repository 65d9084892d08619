// What a run says of itself before its first step.
#include <algorithm>

#include "core/progress.hpp"
#include "engine/trainer.hpp"

namespace layerstream {

void Trainer::log_banner() const {
  const RunConfig& run = config_.run;
  const EngineShape& shape = engine_->shape();
  log_.info("model: {} parameters, {} layers, hidden {}, vocabulary {}, {}", shape.layout.num_parameters(),
            spec_.num_hidden_layers, spec_.hidden_size, spec_.vocab_size,
            spec_.tie_word_embeddings ? "tied embeddings" : "untied embeddings");
  log_.info("numbers: {}; {}", numbers_text(shape), optimizer_text(placement_.run));
  log_.info("steps: {} of {} rows ({} rows an epoch); chunks of up to {} tokens", total_steps_,
            state_.rows_per_step, dataset_->num_rows(), shape.bounds.chunk_tokens);
  std::string decays;
  for (const auto& [decay, count] :
       engine_->parameter_groups().parameters_by_decay(shape.layout, run.weight_decay)) {
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
            backend_decision(placement_.run, device_).reason, engine_->shape().schedule.weight_slots);
  const HostNode& node = engine_->host_node();
  log_.info("host memory: {}{}", node.to_text(), node.node ? "; " + engine_->host_residency().to_text() : "");
  for (const std::string& warning : engine_->host_memory_warnings()) log_.warning("{}", warning);
  if (const HostPin* const pin = engine_->host_pin(); pin != nullptr && !pin->shortfall().empty()) {
    log_.warning("{}; the rest is copied through a small pinned buffer, slower", pin->shortfall());
  }
  log_lines("memory", engine_->ledger().to_table());
}

void Trainer::log_lines(std::string_view subject, std::string_view text) const {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    log_.info("{}: {}", subject, text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

}  // namespace layerstream
