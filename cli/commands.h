// SPDX-License-Identifier: Apache-2.0
// The subcommands of the program, one file each. To add one: a file with an add_ function, and one
// line in commands.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <vector>

namespace bitdecoding::cli {

// Adds a subcommand; when it is the chosen one it runs from its callback and stores the exit code.
using AddCommand = void (*)(CLI::App& app, int* exit_code);

void add_doctor(CLI::App& app, int* exit_code);
void add_serve(CLI::App& app, int* exit_code);
void add_ablate(CLI::App& app, int* exit_code);
void add_calibrate(CLI::App& app, int* exit_code);
void add_eval(CLI::App& app, int* exit_code);
void add_inspect(CLI::App& app, int* exit_code);
void add_recipe(CLI::App& app, int* exit_code);
void add_version(CLI::App& app, int* exit_code);
void add_completion(CLI::App& app, int* exit_code);

const std::vector<AddCommand>& commands();

}  // namespace bitdecoding::cli
