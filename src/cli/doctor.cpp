#include <fmt/chrono.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>

#include "backends/make_device.hpp"
#include "backends/topology/recording.hpp"
#include "cli/commands.hpp"
#include "cli/option_bytes.hpp"
#include "core/affinity.hpp"
#include "core/error.hpp"
#include "doctor/checks.hpp"
#include "engine/memory_plan.hpp"
#include "ops/runtime.hpp"

namespace layerstream::cli {
namespace {

namespace fs = std::filesystem;

struct DoctorOptions {
  std::string output;
  std::string numa = "auto";
  std::string bytes;
  std::string scratch;
};

/// The device with the kernels' runtime, or why there is none.
struct Examined {
  std::optional<ops::Runtime> runtime;
  std::unique_ptr<Device> device;
  std::string problem;

  Examined() {
    try {
      runtime.emplace();
      device = make_device({}, host_budget({}).bytes / 2);
    } catch (const std::exception& error) {  // Kokkos throws its own
      problem = error.what();
    }
  }
};

std::string attributes_text(const Device& device) {
  const DeviceCapabilities capabilities = device.capabilities();
  const auto node_text = [](std::optional<int> node) { return node ? fmt::format("{}", *node) : "unknown"; };
  std::string text =
      fmt::format("device attributes\n  {}\n  PCI {}, link at node {} (kernel), {} (driver)\n",
                  device.description(), capabilities.pci_bus_id.empty() ? "none" : capabilities.pci_bus_id,
                  node_text(capabilities.numa_node), node_text(capabilities.host_numa_id));
  for (const auto& [name, value] : device.attributes()) text += fmt::format("  {} = {}\n", name, value);
  return text;
}

void write_report(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw FileError(fmt::format("{}: cannot be written", path.string()));
}

void examine(const DoctorOptions& options) {
  const Examined examined;
  Device* const device = examined.device.get();
  const NumaTopology topology = read_numa_topology();
  const HostNode node = choose_host_node(topology, options.numa,
                                         device == nullptr ? DeviceCapabilities{} : device->capabilities());
  WorkerPool pool(std::max(1, probe_cpus().usable()));
  const bool simulated = device == nullptr || device->uses_host_memory();
  const std::size_t bytes = bytes_or(
      "--bytes", options.bytes, simulated ? std::size_t{128} << 20 : std::size_t{1} << 30, "1MiB", "1GiB");
  const doctor::Patient patient{
      .device = device,
      .pool = pool,
      .topology = topology,
      .host_node = node,
      .bytes = bytes,
      .file_bytes = bytes,
      .scratch = options.scratch.empty() ? fs::temp_directory_path() : fs::path(options.scratch)};

  std::string report = fmt::format("layerstream doctor, {:%Y-%m-%d %H:%M} UTC\n",
                                   fmt::gmtime(std::chrono::system_clock::now()));
  if (examined.runtime) report += fmt::format("kernels: {}\n", examined.runtime->description());
  report += '\n';
  std::cout << report << std::flush;
  std::vector<doctor::Check> checks = doctor::all_checks();
  if (device == nullptr) {
    checks.insert(checks.begin(), {.name = "presence of a device", .run = [&](const doctor::Patient&) {
                                     return doctor::Finding{
                                         .verdict = doctor::Verdict::fail,
                                         .found = examined.problem,
                                         .expected = "a GPU",
                                         .remedy = "the checks below are the system's alone"};
                                   }});
  }
  const std::vector<doctor::Outcome> outcomes =
      doctor::run_checks(checks, patient, [&](const doctor::Outcome& outcome) {
        const std::string text = outcome.to_text();
        report += text;
        std::cout << text << std::flush;
      });
  const std::string last = doctor::summary(outcomes);
  report += fmt::format("\n{}\n", last);
  std::cout << fmt::format("\n{}\n", last) << std::flush;

  if (!options.output.empty()) {
    report += "\n";
    for (const doctor::Outcome& outcome : outcomes)
      report += fmt::format("  {:6.2f} s  {}\n", outcome.seconds, outcome.name);
    if (device != nullptr) report += "\n" + attributes_text(*device);
    report += "\n" + record_system(device == nullptr ? "" : device->capabilities().pci_bus_id);
    write_report(options.output, report);
    std::cout << fmt::format("wrote {}\n", options.output);
  }
  const int failed = doctor::count(outcomes, doctor::Verdict::fail);
  if (failed > 0) throw Error(fmt::format("doctor: {} of {} checks failed", failed, outcomes.size()));
}

}  // namespace

void add_doctor(CLI::App& program) {
  CLI::App* const command = program.add_subcommand(
      "doctor",
      "Check, in less than a minute, that this machine's memory nodes, kernel settings, link and device are as a "
      "run wants them, and say what to do where they are not; the machine should be idle");
  const auto options = std::make_shared<DoctorOptions>();
  command->add_option(
      "--output", options->output,
      "write everything to this file as well, with the device's attributes and what /sys lists of "
      "memory nodes and link: to be sent in");
  command->add_option("--numa", options->numa, "host node of the buffers: auto, off, or a number")
      ->capture_default_str();
  command->add_option("--bytes", options->bytes,
                      "host and device memory, and a file, to measure with (1GiB)");
  command->add_option("--scratch", options->scratch,
                      "directory on a disk, for that file; else the temporary one");
  command->callback([options] { examine(*options); });
}

}  // namespace layerstream::cli
