#include <fmt/format.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <string>

#include "cli/commands.hpp"
#include "io/file_sink.hpp"
#include "report/figures.hpp"
#include "report/page.hpp"

namespace layerstream::cli {
namespace {

struct ReportOptions {
  std::string run;
  std::string output;
};

void write_report(const ReportOptions& options) {
  const report::RunDirectory run = report::read_run(options.run);
  const std::filesystem::path output =
      options.output.empty() ? run.path / "report.html" : std::filesystem::path(options.output);
  io::replace_file(std::make_shared<io::FileSystem>(), output, report::html_page(report::report_data(run)));
  for (const auto& [name, value] : report::figures_of(run))
    std::cout << fmt::format("{:<28} {}\n", name, value);
  std::cout << output.string() << '\n';
}

}  // namespace

void add_report(CLI::App& program) {
  CLI::App* const command = program.add_subcommand(
      "report",
      "Make one HTML page of a run, also of one that is going on: loss, gradient norm, learning rate, tokens per "
      "second, memory, the lanes of a step and what they waited for");
  const auto options = std::make_shared<ReportOptions>();
  command->add_option("run", options->run, "output_dir of the run")->required();
  command->add_option("--output,-o", options->output,
                      "the page (default: report.html in the run's directory)");
  command->callback([options] { write_report(*options); });
}

}  // namespace layerstream::cli
