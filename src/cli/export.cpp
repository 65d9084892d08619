#include <iostream>
#include <memory>

#include "backends/host_region.hpp"
#include "cli/commands.hpp"
#include "cli/saved_model.hpp"

namespace layerstream::cli {
namespace {

struct ExportOptions {
  std::string checkpoint;
  std::string output;
  std::string dtype;
};

DType export_dtype(const ExportOptions& options, const ModelSpec& spec) {
  if (options.dtype == "fp32") return DType::f32;
  if (options.dtype == "bf16") return DType::bf16;
  if (options.dtype == "fp16") return DType::f16;
  const std::optional<DType> own = dtype_from_hf_name(spec.dtype);
  if (!own) {
    throw ConfigError(
        fmt::format("config.json names dtype '{}', which cannot be exported; give --dtype", spec.dtype));
  }
  return *own;
}

void run_export(const ExportOptions& options) {
  const SavedModel model(options.checkpoint);
  const ModelLayout layout = make_layout(model.spec());
  Ledger planned;
  Arena dry = Arena::dry(Space::host, planned);
  const ParameterStore counted(layout, dry, false);
  const HostRegion region(
      planned.total(Space::host),
      {.component = "weights", .numa_node = {}, .pool = nullptr, .available_bytes = {}, .progress = {}});
  Ledger ledger;
  Arena host(Space::host, region.data(), region.bytes(), ledger);
  ParameterStore store(layout, host, false);
  model.load(store);
  const DType dtype = export_dtype(options, model.spec());
  export_model(store, {.directory = options.output,
                       .config_json = model.config_json(),
                       .dtype = dtype,
                       .companions_from = model.directory()});
  std::cout << fmt::format("{}: {} parameters in {}\n", options.output, layout.num_parameters(),
                           name_of(dtype));
}

}  // namespace

void add_export(CLI::App& program) {
  CLI::App* const command =
      program.add_subcommand("export", "Write a checkpoint as a Hugging Face directory");
  const auto options = std::make_shared<ExportOptions>();
  command->add_option("--checkpoint", options->checkpoint, "checkpoint directory")->required();
  command->add_option("--output", options->output, "directory to write; must not exist")->required();
  command->add_option("--dtype", options->dtype, "default: the dtype that the model's config.json names")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  command->callback([options] { run_export(*options); });
}

}  // namespace layerstream::cli
