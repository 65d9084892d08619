#pragma once

#include <CLI/CLI.hpp>

namespace layerstream::cli {

/// Each adds its subcommand to the program; running it happens in its callback, whose exceptions main
/// turns into messages and exit codes.
void add_train(CLI::App& program);
void add_plan(CLI::App& program);
void add_calibrate(CLI::App& program);
void add_replan(CLI::App& program);
void add_doctor(CLI::App& program);
void add_export(CLI::App& program);
void add_generate(CLI::App& program);
void add_inspect_data(CLI::App& program);
void add_report(CLI::App& program);
void add_compare(CLI::App& program);

}  // namespace layerstream::cli
