#include <fmt/format.h>

#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "backends/described_device.hpp"
#include "backends/make_device.hpp"
#include "cli/commands.hpp"
#include "cli/config_options.hpp"
#include "engine/longest_row.hpp"
#include "engine/machine_table.hpp"
#include "engine/planner.hpp"
#include "engine/trainer.hpp"
#include "io/dataset_preparation.hpp"
#include "ops/runtime.hpp"
#include "profiles/hardware/shipped_profiles.hpp"

namespace layerstream::cli {
namespace {

struct PlanOptions {
  ConfigOptions config;
  bool machines = false;
  bool longest_row = false;
};

void print_run(const RunConfig& run, const EngineShape& shape, const Device& device) {
  std::cout << fmt::format("model  {} parameters, {} blocks, {} compute\n", shape.layout.num_parameters(),
                           shape.layout.num_blocks(), name_of(shape.compute));
  std::cout << fmt::format("step   {} rows of {} tokens, chunks of up to {}\n",
                           run.per_device_train_batch_size * run.gradient_accumulation_steps, run.cutoff_len,
                           shape.bounds.chunk_tokens);
  std::cout << fmt::format("backend {}\n", backend_decision(run, device).to_text());
}

/// With the rates of a profile: everything is decided and predicted.
void print_plan(const ModelSpec& spec, const RunConfig& run, const Machine& machine, std::size_t data_bytes) {
  const Plan plan = plan_placement(spec, run, machine, data_bytes);
  print_run(run, plan.memory.shape, machine.device);
  std::cout << fmt::format("machine {}: {}\n", machine.profile.name, machine.profile.description);
  std::cout << plan.memory.ledger.to_table() << plan.placement_yaml() << plan.summary();
  if (const std::string warning = long_row_warning(spec, run.cutoff_len); !warning.empty()) {
    std::cout << "warning: " << warning << '\n';
  }
  std::cout << fmt::format(
      "  fits: device {} of {}, host {} of {} ({})\n", format_bytes(plan.memory.ledger.total(Space::device)),
      format_bytes(machine.device.memory_limit()), format_bytes(plan.memory.ledger.total(Space::host)),
      format_bytes(machine.host.bytes), machine.host.bound_by);
}

void print_longest_row(const ModelSpec& spec, const RunConfig& run, const Machine& machine,
                       std::size_t data_bytes) {
  const LongestRow longest = find_longest_row(spec, run, machine, data_bytes);
  std::cout << fmt::format("longest row on {}: {} tokens, one row a step\n", machine.profile.name,
                           longest.tokens);
  if (longest.plan) {
    std::cout << longest.plan->placement_yaml() << longest.plan->summary();
    std::cout << fmt::format("  device {} of {}, host {} of {} ({})\n",
                             format_bytes(longest.plan->memory.ledger.total(Space::device)),
                             format_bytes(machine.device.memory_limit()),
                             format_bytes(longest.plan->memory.ledger.total(Space::host)),
                             format_bytes(machine.host.bytes), machine.host.bound_by);
  }
  std::cout << fmt::format("what limits it, for {} tokens more: {}\n", longest_row_unit, longest.limit);
  if (const std::string warning = long_row_warning(spec, longest.tokens); !warning.empty()) {
    std::cout << "  " << warning << '\n';
  }
}

/// Without rates: memory alone.
void print_memory(const ModelSpec& spec, const RunConfig& run, Device& device, const HostBudget& host,
                  std::size_t data_bytes) {
  const auto [shape, ledger] = plan_run(spec, run, device, data_bytes);
  print_run(run, shape, device);
  std::cout << ledger.to_table();
  if (device.uses_host_memory()) {
    std::cout << fmt::format("  process peak in this build (the device is simulated in host memory): {}\n",
                             format_bytes(ledger.total(Space::host) + ledger.total(Space::device)));
  }
  check_memory(ledger, host, device);
  std::cout << fmt::format("  fits: host has {} ({})\n", format_bytes(host.bytes), host.bound_by);
}

/// Of the data of a role in host memory; nothing is prepared for it.
std::size_t bytes_of_data(const RunConfig& run, io::DataRole role, std::int64_t vocab_size) {
  const std::optional<std::vector<std::string>> inputs = io::ready_inputs(run, role);
  const std::string_view key = io::data_key(run, role);
  if (!inputs) {
    std::cout << fmt::format("data    {} is not counted: it is tokenized when the run begins\n", key);
    return 0;
  }
  if (inputs->empty()) return 0;
  io::DatasetOptions options = io::dataset_options(run, vocab_size);
  options.inputs = *inputs;
  options.key = key;
  return io::Dataset::load(options).bytes();
}

void plan(const PlanOptions& options) {
  const LoadedConfig config = options.config.load();
  if (options.config.print_if_asked(config)) return;
  check_config(config);
  const HfConfigText text = model_config_of(config.run);
  const ModelSpec spec = parse_hf_config(text.text, text.path);

  const ops::Runtime runtime;
  const std::size_t data_bytes = bytes_of_data(config.run, io::DataRole::train, spec.vocab_size) +
                                 bytes_of_data(config.run, io::DataRole::held_out, spec.vocab_size);
  if (options.machines) {
    std::cout << machine_table(spec, config.run, data_bytes) << std::flush;
    return;
  }
  const auto print = options.longest_row ? print_longest_row : print_plan;
  if (!config.run.hardware_profile.empty()) {
    const HardwareProfile profile = find_hardware_profile(config.run.hardware_profile);
    DescribedDevice device = described_device(profile, config.run);
    print(spec, config.run, {profile, device, described_host(profile, config.run)}, data_bytes);
    return;
  }
  const std::unique_ptr<Device> device =
      make_device(config.run.device_memory_limit, host_budget(config.run).bytes);
  const HostBudget host = host_budget(config.run, host_node(config.run, *device).node);
  if (const std::optional<HardwareProfile> profile = profile_of_run(config.run, *device)) {
    print(spec, config.run, {*profile, *device, host}, data_bytes);
  } else if (options.longest_row) {
    throw ConfigError(
        "--max-seq: this device has no profile; name one with --set hardware_profile=NAME (see layerstream calibrate)");
  } else {
    print_memory(spec, config.run, *device, host, data_bytes);
  }
}

}  // namespace

void add_plan(CLI::App& program) {
  CLI::App* const command = program.add_subcommand(
      "plan",
      "Print where every byte of a run would go, without allocating it, and how fast a step would be; reads "
      "the training data, needs no GPU. With hardware_profile: on a machine that is not here");
  const auto options = std::make_shared<PlanOptions>();
  options->config.add_to(*command);
  command->add_flag("--machines", options->machines,
                    "a table instead: this run on each shipped machine, and the largest model of its widths");
  command->add_flag(
      "--max-seq", options->longest_row,
      "the longest row that the machine can train instead, one row a step, how fast, and what limits it");
  command->callback([options] { plan(*options); });
}

}  // namespace layerstream::cli
