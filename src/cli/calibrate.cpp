#include <fmt/chrono.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>

#include "backends/make_device.hpp"
#include "cli/commands.hpp"
#include "cli/option_bytes.hpp"
#include "core/affinity.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "engine/calibration.hpp"
#include "engine/memory_plan.hpp"
#include "model/hf_config.hpp"
#include "ops/runtime.hpp"

namespace layerstream::cli {
namespace {

namespace fs = std::filesystem;

struct CalibrateOptions {
  std::string model;
  std::string output;
  std::string name;
  std::string host_memory, device_memory;
  double seconds_per_rate = CalibrationOptions{}.seconds_per_rate;
  bool force = false;
};

/// Appears complete or not at all.
void write_file(const fs::path& path, const std::string& text) {
  const fs::path part = path.string() + ".part";
  {
    std::ofstream file(part, std::ios::binary);
    file << text;
    file.close();
    if (!file) throw FileError(fmt::format("{}: cannot be written; is the disk full?", part.string()));
  }
  fs::rename(part, path);
}

void calibrate_machine(const CalibrateOptions& options) {
  const fs::path output = options.output;
  // Before minutes of measuring.
  if (fs::exists(output) && !options.force) {
    throw FileError(
        fmt::format("{}: exists; choose another --output, or --force to replace it", options.output));
  }
  const fs::path folder = output.has_parent_path() ? output.parent_path() : fs::path(".");
  if (!fs::is_directory(folder)) {
    throw FileError(
        fmt::format("{}: no such directory; make it, or choose another --output", folder.string()));
  }
  const ModelSpec spec = load_hf_config(options.model);
  const Log log;
  const ops::Runtime runtime;
  log.info("kernels: {}", runtime.description());
  for (const std::string& warning : runtime.warnings()) log.warning("{}", warning);
  const HostBudget host = host_budget({});
  const std::unique_ptr<Device> device = make_device({}, host.bytes / 2);
  log.info("device: {}", device->description());

  CalibrationOptions settings;
  settings.host_bytes = bytes_or("--host-memory", options.host_memory, settings.host_bytes, "8MiB", "4GiB");
  settings.device_bytes =
      bytes_or("--device-memory", options.device_memory, settings.device_bytes, "8MiB", "4GiB");
  settings.seconds_per_rate = options.seconds_per_rate;
  settings.host_budget = host.bytes;
  settings.threads = probe_cpus().usable();
  if (device->uses_host_memory()) {  // as fast as its host: less of everything
    settings.largest_chunk = 2048;
    settings.device_bytes = std::min(settings.device_bytes, std::size_t{1} << 30);
  }

  log.info("taking {} of host and up to {} of device memory",
           format_bytes(std::min(settings.host_bytes, host.bytes / 8)), format_bytes(settings.device_bytes));
  const auto start = std::chrono::steady_clock::now();
  const std::string date = fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::chrono::system_clock::now()));
  Calibration result =
      calibrate(*device, spec, settings, fmt::format("measured by layerstream calibrate, {}", date),
                [&](std::string_view what) { log.info("{}", what); });
  result.profile.name = options.name.empty() ? output.stem().string() : options.name;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const std::string comment = fmt::format(
      "layerstream calibrate --model {}, {}, {:.0f} s\ndevice: {}\nkernels: {}\ncompiler: {}\n{}products and "
      "attention: hidden {}, {}/{} heads of {}, ffn {}",
      options.model, date, seconds, device->description(), runtime.description(), __VERSION__, result.notes,
      spec.hidden_size, spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim,
      spec.intermediate_size);
  const std::string text = to_yaml(result.profile, comment);
  parse_hardware_profile(text, options.output);  // what is written can be read
  write_file(output, text);
  log.info("wrote {} after {:.0f} s", options.output, seconds);
}

}  // namespace

void add_calibrate(CLI::App& program) {
  CLI::App* const command = program.add_subcommand(
      "calibrate",
      "Measure what this machine can do, in less than two minutes, and write a hardware profile for "
      "the planner; the machine should be idle");
  const auto options = std::make_shared<CalibrateOptions>();
  command->add_option("--model", options->model, "config.json, or its directory: whose shapes are measured")
      ->required();
  command->add_option("--output", options->output, "YAML file to write")->required();
  command->add_flag("--force", options->force, "replace the file if it exists");
  command->add_option("--name", options->name, "of the profile; else the file's");
  command->add_option("--host-memory", options->host_memory, "bytes to measure with, at most (4GiB)");
  command->add_option("--device-memory", options->device_memory, "bytes to measure with, at most (6GiB)");
  command->add_option("--seconds-per-rate", options->seconds_per_rate, "how long to measure each number")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 60.0));
  command->callback([options] { calibrate_machine(*options); });
}

}  // namespace layerstream::cli
