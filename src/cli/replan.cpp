#include <fmt/format.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "engine/replan.hpp"
#include "profiles/hardware/shipped_profiles.hpp"

namespace layerstream::cli {
namespace {

struct ReplanOptions {
  std::string run_directory;
  std::vector<std::string> assignments;
};

void replan(const ReplanOptions& options) {
  LoadedConfig request = parse_replan_request("", "replan", options.assignments);
  if (std::string& profile = request.run.hardware_profile; !profile.empty()) {
    (void)find_hardware_profile(profile);
    // The run may have another working directory.
    if (!shipped_profile(profile)) profile = std::filesystem::absolute(profile).string();
  }
  const bool replaced = ReplanRequests(options.run_directory).submit(request);
  std::cout << fmt::format(
      "{}{}: the running process takes it up after its present step, and its log says what came of it; the request is "
      "then {} or {} there\n",
      (std::filesystem::path(options.run_directory) / ReplanRequests::waiting_name).string(),
      replaced ? " (in place of one that still waited)" : "", ReplanRequests::applied_name,
      ReplanRequests::refused_name);
}

}  // namespace

void add_replan(CLI::App& program) {
  CLI::App* const command = program.add_subcommand(
      "replan",
      "Ask the process that trains in RUN_DIR for another placement, between two steps; its results stay the same bit "
      "for bit");
  const auto options = std::make_shared<ReplanOptions>();
  command->add_option("run_dir", options->run_directory, "output_dir of the run")->required();
  command
      ->add_option(
          "--set", options->assignments,
          "key=value of a placement key, a memory limit, optimizer_threads or pin_memory; key=null gives a "
          "placement key back to the planner; may be given several times")
      ->required()
      ->allow_extra_args(false);
  command->callback([options] { replan(*options); });
}

}  // namespace layerstream::cli
