#include <iostream>
#include <memory>

#include "backends/simulated_device.hpp"
#include "cli/commands.hpp"
#include "cli/config_options.hpp"
#include "core/process_memory.hpp"
#include "engine/trainer.hpp"
#include "ops/runtime.hpp"

namespace layerstream::cli {
namespace {

void train(const ConfigOptions& options) {
  const LoadedConfig config = options.load();
  if (options.print_if_asked(config)) return;
  const Log log;
  StopRequest stop;
  const SignalHandlers handlers(stop);
  const ops::Runtime runtime;
  log.info("kernels: {}", runtime.description());
  for (const std::string& warning : runtime.warnings()) log.warning("{}", warning);
  SimulatedDevice device(config.run.device_memory_limit.value_or(host_budget(config.run).bytes));
  Trainer trainer(config, device, stop, log);
  const TrainingEnd end = trainer.run();
  log.info("{} steps, last loss {:.4f}, peak memory of the process {}", end.global_step, end.last_loss,
           format_bytes(ProcessMemory::now().peak));
  if (end.interrupted) throw Interrupted(fmt::format("interrupted after step {}", end.global_step));
}

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("train", "Train a model as the configuration says");
  const auto options = std::make_shared<ConfigOptions>();
  options->add_to(*command);
  command->callback([options] { train(*options); });
}

}  // namespace layerstream::cli
