#include <iostream>
#include <memory>
#include <optional>

#include "backends/make_device.hpp"
#include "cli/commands.hpp"
#include "cli/config_options.hpp"
#include "core/process_memory.hpp"
#include "engine/trainer.hpp"
#include "ops/runtime.hpp"
#include "profiles/nvtx/annotation.hpp"

namespace layerstream::cli {
namespace {

void train(const ConfigOptions& options) {
  const LoadedConfig config = options.load();
  if (options.print_if_asked(config)) return;
  const Log log;
  StopRequest stop;
  const SignalHandlers handlers(stop);
  std::optional<ops::KernelLabels> kernel_labels;
  if (config.run.profile_kernels) kernel_labels.emplace();
  const ops::Runtime runtime;
  log.info("kernels: {}", runtime.description());
  for (const std::string& warning : runtime.warnings()) log.warning("{}", warning);
  const std::unique_ptr<Device> device =
      make_device(config.run.device_memory_limit, host_budget(config.run).bytes);
  const std::unique_ptr<ExecutionObserver> annotation =
      make_annotation(kernel_labels ? &*kernel_labels : nullptr);
  Trainer trainer(config, *device, stop, log, {}, annotation.get());
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
