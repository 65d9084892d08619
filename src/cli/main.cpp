#include <csignal>
#include <exception>
#include <iostream>

#include "cli/commands.hpp"
#include "core/error.hpp"

int main(int argc, char** argv) {
  using namespace layerstream;
  // Whoever ignores it hands that on, and how children end would be lost.
  std::signal(SIGCHLD, SIG_DFL);
  CLI::App program{
      "layerstream: full-precision training of large language models, streamed from host memory"};
  program.require_subcommand(1);
  program.footer(
      "Exit codes: 0 done, 1 failed, 2 configuration, files or memory refused, 3 too many steps in "
      "a row were left out, 75 interrupted by a signal (with a checkpoint if a step was done; run again)");
  cli::add_train(program);
  cli::add_plan(program);
  cli::add_replan(program);
  cli::add_report(program);
  cli::add_compare(program);
  cli::add_calibrate(program);
  cli::add_doctor(program);
  cli::add_export(program);
  cli::add_generate(program);
  cli::add_inspect_data(program);
  try {
    program.parse(argc, argv);
    return exit_code::success;
  } catch (const CLI::Success& success) {  // --help
    return program.exit(success);
  } catch (const CLI::ParseError& error) {
    program.exit(error);
    return exit_code::refused;
  } catch (const Error& error) {
    std::cerr << "layerstream: " << error.what() << '\n';
    return error.code();
  } catch (const std::exception& error) {
    std::cerr << "layerstream: " << error.what() << '\n';
    return exit_code::failure;
  }
}
