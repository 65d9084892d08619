#include "core/config_namer.hpp"

namespace layerstream {

void check_data(const RunConfig& run, const Namer& name, ConfigProblems& problems) {
  const auto exclude = [&](std::string_view prepared, bool has_prepared, std::string_view dataset,
                           bool has_dataset) {
    if (!has_prepared || !has_dataset) return;
    problems.add("{} and {} exclude each other: the first is read as it is, the second is tokenized first",
                 name(prepared), name(dataset));
  };
  exclude("train_file", !run.train_file.empty(), "dataset", !run.dataset.empty());
  exclude("validation_file", !run.validation_file.empty(), "eval_dataset", !run.eval_dataset.empty());
  const bool prepares = !run.dataset.empty() || !run.eval_dataset.empty();
  if (prepares && run.tokenizer_name.empty() && run.model_name_or_path.empty()) {
    problems.add("{} needs a tokenizer: set tokenizer_name to a Hugging Face model directory",
                 run.dataset.empty() ? name("eval_dataset") : name("dataset"));
  }
  if (!prepares) {
    for (const std::string_view key :
         {"tokenizer_name", "chat_template", "train_on_prompt", "mask_history", "tokenized_path"}) {
      if (name.is_default(key)) continue;
      problems.add("{} means nothing without dataset or eval_dataset; drop it", name(key));
    }
  }
  if (run.dataset.size() < 2 && run.mix_strategy != MixStrategy::concat) {
    problems.add("{} means nothing with fewer than two datasets, and {}; drop it", name("mix_strategy"),
                 name("dataset"));
  }
  if (run.interleave_probs.empty()) return;
  if (run.mix_strategy == MixStrategy::concat) {
    problems.add(
        "{} means nothing with {}; drop it, or set mix_strategy: interleave_under or interleave_over",
        name("interleave_probs"), name("mix_strategy"));
  } else if (run.interleave_probs.size() != run.dataset.size()) {
    problems.add("{} must have one number for each dataset, and {}", name("interleave_probs"),
                 name("dataset"));
  }
}

}  // namespace layerstream
