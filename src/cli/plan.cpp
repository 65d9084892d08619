#include <iostream>
#include <memory>
#include <optional>

#include "backends/make_device.hpp"
#include "cli/commands.hpp"
#include "cli/config_options.hpp"
#include "engine/engine.hpp"
#include "engine/trainer.hpp"
#include "ops/runtime.hpp"

namespace layerstream::cli {
namespace {

void plan(const ConfigOptions& options) {
  const LoadedConfig config = options.load();
  if (options.print_if_asked(config)) return;
  check_config(config);
  const HfConfigText text = model_config_of(config.run);
  const ModelSpec spec = parse_hf_config(text.text, text.path);

  const ops::Runtime runtime;
  std::optional<io::Dataset> dataset;
  if (!config.run.train_file.empty()) {
    dataset = io::Dataset::load(io::dataset_options(config.run, spec.vocab_size));
  }
  const HostBudget host = host_budget(config.run);
  const std::unique_ptr<Device> device = make_device(config.run.device_memory_limit, host.bytes);
  const auto [shape, ledger] = plan_run(spec, config.run, *device, dataset ? dataset->bytes() : 0);

  std::cout << fmt::format("model  {} parameters, {} blocks, {} compute\n", shape.layout.num_parameters(),
                           shape.layout.num_blocks(), name_of(shape.compute));
  std::cout << fmt::format("step   {} rows of {} tokens, chunks of up to {}\n",
                           config.run.per_device_train_batch_size * config.run.gradient_accumulation_steps,
                           config.run.cutoff_len, shape.bounds.chunk_tokens);
  std::cout << ledger.to_table();
  if (device->uses_host_memory()) {
    std::cout << fmt::format("  process peak in this build (the device is simulated in host memory): {}\n",
                             format_bytes(ledger.total(Space::host) + ledger.total(Space::device)));
  }
  check_memory(ledger, host, *device);
  std::cout << fmt::format("  fits: host has {} ({})\n", format_bytes(host.bytes), host.bound_by);
}

}  // namespace

void add_plan(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("plan",
                                                   "Print where every byte of a run would go, without "
                                                   "allocating it; reads the training data, needs no GPU");
  const auto options = std::make_shared<ConfigOptions>();
  options->add_to(*command);
  command->callback([options] { plan(*options); });
}

}  // namespace layerstream::cli
