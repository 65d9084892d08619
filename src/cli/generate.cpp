#include <algorithm>
#include <iostream>
#include <memory>

#include "backends/make_device.hpp"
#include "cli/commands.hpp"
#include "cli/saved_model.hpp"
#include "engine/engine.hpp"
#include "engine/sampling.hpp"
#include "io/byte_tokenizer.hpp"
#include "ops/runtime.hpp"

namespace layerstream::cli {
namespace {

struct GenerateOptions {
  std::string checkpoint;
  std::string prompt;
  std::vector<std::int32_t> prompt_ids;
  std::int64_t max_new_tokens = 200;
  double temperature = 0.8;
  std::uint64_t seed = 42;
  std::string compute_dtype = "fp32";
  bool ignore_eos = false;
};

std::vector<std::int32_t> prompt_of(const GenerateOptions& options, const SavedModel& model) {
  std::vector<std::int32_t> ids = options.prompt_ids;
  if (ids.empty()) {
    if (has_tokenizer(model.directory())) {
      throw ConfigError(
          fmt::format("{} has a tokenizer of its own: give --prompt-ids (tools/ has the real tokenizers)",
                      model.directory().string()));
    }
    if (model.spec().vocab_size < io::ByteTokenizer::vocab_size) {
      throw ConfigError(
          fmt::format("{}: a vocabulary of {} has no room for the {} byte tokens of --prompt; give "
                      "--prompt-ids",
                      model.directory().string(), model.spec().vocab_size, io::ByteTokenizer::vocab_size));
    }
    ids = io::ByteTokenizer::encode(options.prompt);
    // A text begins where another one ended.
    if (ids.empty()) ids.push_back(io::ByteTokenizer::end_of_document);
  }
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= model.spec().vocab_size) {
      throw ConfigError(
          fmt::format("--prompt-ids: {} is outside the vocabulary of {}", id, model.spec().vocab_size));
    }
  }
  return ids;
}

/// Tokens that end the text, and are not part of it.
std::vector<std::int32_t> end_tokens(const GenerateOptions& options, const SavedModel& model) {
  if (options.ignore_eos) return {};
  if (options.prompt_ids.empty()) return {io::ByteTokenizer::end_of_document};
  return model.end_tokens();
}

void generate(const GenerateOptions& options) {
  const SavedModel model(options.checkpoint);
  std::vector<std::int32_t> ids = prompt_of(options, model);
  const std::vector<std::int32_t> ends = end_tokens(options, model);
  const bool bytes = options.prompt_ids.empty();

  const RunConfig trained = model.trained_with();
  RunConfig run;
  run.rope = trained.rope;
  run.attention_pattern = trained.attention_pattern;
  run.compute_dtype = options.compute_dtype == "bf16" ? DType::bf16 : DType::f32;
  run.cutoff_len = static_cast<std::int64_t>(ids.size()) + options.max_new_tokens;
  run.chunk_tokens = 512;
  const ops::Runtime runtime;
  const std::unique_ptr<Device> device = make_device(run.device_memory_limit, host_budget(run).bytes);
  Engine engine(model.spec(), run, EngineMode::generate, *device);
  model.load(engine.parameters());

  if (bytes) std::cout << options.prompt << std::flush;
  std::vector<float> logits = engine.append(ids);
  std::vector<std::int32_t> generated;
  for (std::int64_t i = 0; i < options.max_new_tokens; ++i) {
    const std::int32_t next =
        sample_token(logits, options.temperature, options.seed, static_cast<std::uint64_t>(i));
    if (std::ranges::find(ends, next) != ends.end()) break;
    generated.push_back(next);
    if (i + 1 < options.max_new_tokens) logits = engine.append({&next, 1});
  }
  if (bytes) {
    std::cout << io::ByteTokenizer::decode(generated) << '\n';
  } else {
    std::cout << fmt::format("{}\n", fmt::join(generated, " "));
  }
}

}  // namespace

void add_generate(CLI::App& program) {
  CLI::App* const command =
      program.add_subcommand("generate", "Sample from a checkpoint or a Hugging Face directory");
  const auto options = std::make_shared<GenerateOptions>();
  command->add_option("--checkpoint", options->checkpoint, "checkpoint or model directory")->required();
  command->add_option("--prompt", options->prompt,
                      "text to continue (models with the built-in byte tokenizer)");
  command->add_option("--prompt-ids", options->prompt_ids, "token ids to continue; prints ids")
      ->delimiter(',')
      ->excludes("--prompt");
  command->add_option("--max-new-tokens", options->max_new_tokens)->check(CLI::PositiveNumber);
  command->add_option("--temperature", options->temperature, "0: the likeliest token each time")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--seed", options->seed);
  command->add_option("--compute-dtype", options->compute_dtype)->check(CLI::IsMember({"fp32", "bf16"}));
  command->add_flag(
      "--ignore-eos", options->ignore_eos,
      "go on after an end token: eos_token_id of generation_config.json or config.json, or with --prompt "
      "the end of a document");
  command->callback([options] { generate(*options); });
}

}  // namespace layerstream::cli
