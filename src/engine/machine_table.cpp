#include "engine/machine_table.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"
#include "profiles/hardware/shipped_profiles.hpp"

namespace layerstream {
namespace {

/// The same model with as many layers as there is a placement for; 0: not even one.
ModelSpec largest_model(ModelSpec spec, const RunConfig& config, const Machine& machine,
                        std::size_t data_bytes) {
  const auto fits = [&](std::int64_t layers) {
    spec.num_hidden_layers = layers;
    return can_be_placed(spec, config, machine, data_bytes);
  };
  std::int64_t fitting = 0;
  std::int64_t failing = 1;
  while (fits(failing)) {
    fitting = failing;
    failing *= 2;
  }
  while (failing - fitting > 1) {
    const std::int64_t middle = fitting + (failing - fitting) / 2;
    (fits(middle) ? fitting : failing) = middle;
  }
  spec.num_hidden_layers = fitting;
  return spec;
}

}  // namespace

DescribedDevice described_device(const HardwareProfile& profile, const RunConfig& config) {
  // What the driver keeps for itself.
  constexpr double usable = 0.99;
  const auto bytes = static_cast<std::size_t>(usable * profile.device.memory_bytes.value);
  return DescribedDevice({.name = profile.device.name,
                          .memory_limit = std::min(bytes, config.device_memory_limit.value_or(bytes)),
                          .uses_host_memory = profile.device.simulated,
                          .capabilities = {.shares_host_page_tables = profile.link.coherent,
                                           .pageable_memory_access = profile.link.coherent}});
}

HostBudget described_host(const HardwareProfile& profile, const RunConfig& config) {
  // The system, and what else runs on a machine that trains.
  constexpr double usable = 0.95;
  if (config.host_memory_limit) return {*config.host_memory_limit, "host_memory_limit"};
  return {static_cast<std::size_t>(usable * profile.host.memory_bytes.value),
          fmt::format("95% of the memory of {}", profile.name)};
}

std::string machine_table(const ModelSpec& spec, const RunConfig& config, std::size_t data_bytes) {
  std::string table =
      "| machine | tokens/s | s a step | device GB | host GB | bottleneck | largest model |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n";
  for (const std::string& name : shipped_profile_names()) {
    const HardwareProfile profile = *shipped_profile(name);
    DescribedDevice device = described_device(profile, config);
    const HostBudget host = described_host(profile, config);
    const Machine machine{.profile = profile, .device = device, .host = host};
    std::string largest_text = "none";
    try {
      const ModelSpec largest = largest_model(spec, config, machine, data_bytes);
      if (largest.num_hidden_layers > 0) {
        largest_text = fmt::format("{:.1f}B ({} layers)",
                                   1e-9 * static_cast<double>(make_layout(largest).num_parameters()),
                                   largest.num_hidden_layers);
      }
      const Plan plan = plan_placement(spec, config, machine, data_bytes);
      table += fmt::format("| {} | {:.0f} | {:.4g} | {:.0f} | {:.0f} | {} | {} |\n", name,
                           plan.tokens_per_second(), plan.prediction.run.seconds,
                           1e-9 * static_cast<double>(plan.memory.ledger.total(Space::device)),
                           1e-9 * static_cast<double>(plan.memory.ledger.total(Space::host)),
                           plan.bottleneck.what, largest_text);
    } catch (const Error& error) {  // of this machine: memory, or a backend that it does not have
      if (error.code() != exit_code::refused) throw;
      const std::string message = error.what();
      table += fmt::format("| {} | refused | | | | {} | {} |\n", name, message.substr(0, message.find('\n')),
                           largest_text);
    }
  }
  return table;
}

}  // namespace layerstream
