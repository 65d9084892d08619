#include <algorithm>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "io/file_sink.hpp"
#include "report/page.hpp"

namespace layerstream::cli {
namespace {

struct CompareOptions {
  std::vector<std::string> runs;
  std::string output = "compare.html";
};

void write_comparison(const CompareOptions& options) {
  std::vector<report::RunDirectory> runs;
  std::ranges::transform(options.runs, std::back_inserter(runs), report::read_run);
  const report::Comparison comparison = report::compare(runs);
  io::replace_file(std::make_shared<io::FileSystem>(), options.output,
                   report::html_page(report::compare_data(runs, comparison)));
  std::cout << comparison.to_text() << '\n' << options.output << '\n';
}

}  // namespace

void add_compare(CLI::App& program) {
  CLI::App* const command = program.add_subcommand(
      "compare",
      "Put runs side by side: a table of their figures and of what differs in their configuration, and one HTML "
      "page with their curves");
  const auto options = std::make_shared<CompareOptions>();
  command->add_option("runs", options->runs, "output_dir of each run")->required()->expected(2, -1);
  command->add_option("--output,-o", options->output, "the page")->capture_default_str();
  command->callback([options] { write_comparison(*options); });
}

}  // namespace layerstream::cli
