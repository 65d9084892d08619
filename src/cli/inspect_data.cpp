#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "cli/config_options.hpp"
#include "core/signals.hpp"
#include "engine/trainer.hpp"
#include "io/dataset_preparation.hpp"
#include "io/inspect.hpp"
#include "io/token_texts.hpp"

namespace layerstream::cli {
namespace {

struct InspectCommand {
  ConfigOptions config;
  io::InspectOptions inspect;
};

/// Of the training data; a dataset that is not tokenized yet is prepared, as for `train`.
std::vector<std::string> inputs_of(const RunConfig& run, const std::string& model_config) {
  StopRequest stop;
  const SignalHandlers handlers(stop);
  return io::prepared_inputs(run, io::DataRole::train, model_config,
                             {.say = [](std::string_view line) { std::cerr << line << std::endl; },
                              .poll = [&] { stop.throw_if_requested("preparing the training data"); }});
}

void inspect_data(const InspectCommand& command) {
  const LoadedConfig config = command.config.load();
  if (command.config.print_if_asked(config)) return;
  check_config(config);
  const HfConfigText model = model_config_of(config.run);
  const ModelSpec spec = parse_hf_config(model.text, model.path);
  io::DatasetOptions options = io::dataset_options(config.run, spec.vocab_size);
  options.inputs = inputs_of(config.run, model.path);
  options.key = io::data_key(config.run, io::DataRole::train);
  const io::Dataset dataset = io::Dataset::load(options);
  const std::string warning = byte_token_warning(config.run, dataset.report());
  if (!warning.empty()) std::cerr << "warning: " << warning << '\n';
  io::TokenTexts texts;
  io::InspectOptions inspect = command.inspect;
  inspect.token_text = [&](const std::string& shard, std::int32_t id) { return texts.quoted(shard, id); };
  std::cout << io::inspect(dataset, inspect);
}

}  // namespace

void add_inspect_data(CLI::App& program) {
  CLI::App* const command = program.add_subcommand(
      "inspect-data", "Show what the training data becomes: counts, lengths, and tokens beside their mask");
  const auto options = std::make_shared<InspectCommand>();
  options->config.add_to(*command);
  command->add_option("--rows", options->inspect.num_rows, "rows to show")->check(CLI::NonNegativeNumber);
  command->add_option("--tokens", options->inspect.tokens_per_row, "tokens of a row to show")
      ->check(CLI::NonNegativeNumber);
  command->callback([options] { inspect_data(*options); });
}

}  // namespace layerstream::cli
