#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "cli/config_options.hpp"
#include "engine/trainer.hpp"
#include "io/inspect.hpp"

namespace layerstream::cli {

void add_inspect_data(CLI::App& program) {
  CLI::App* const command = program.add_subcommand(
      "inspect-data", "Show what the training data becomes: counts, lengths, and tokens beside their mask");
  const auto options = std::make_shared<ConfigOptions>();
  const auto inspect = std::make_shared<io::InspectOptions>();
  options->add_to(*command);
  command->add_option("--rows", inspect->num_rows, "rows to show")->check(CLI::NonNegativeNumber);
  command->add_option("--tokens", inspect->tokens_per_row, "tokens of a row to show")
      ->check(CLI::NonNegativeNumber);
  command->callback([options, inspect] {
    const LoadedConfig config = options->load();
    if (options->print_if_asked(config)) return;
    check_config(config);
    require_keys(config, {"train_file"}, "inspect-data");
    const HfConfigText text = model_config_of(config.run);
    const ModelSpec spec = parse_hf_config(text.text, text.path);
    const io::Dataset dataset = io::Dataset::load(io::dataset_options(config.run, spec.vocab_size));
    const std::string warning = byte_token_warning(config.run, dataset.report());
    if (!warning.empty()) std::cerr << "warning: " << warning << '\n';
    std::cout << io::inspect(dataset, *inspect);
  });
}

}  // namespace layerstream::cli
