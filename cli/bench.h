// SPDX-License-Identifier: Apache-2.0
// `bitdecoding bench`: times the three verbs on one layer of made-up data, beside the machine's
// read bandwidth and other systems' operators.
#pragma once

#include <CLI/CLI.hpp>

namespace bitdecoding::cli {

// Adds `bench` with its subcommands; the chosen one stores the program's exit code.
void add_bench(CLI::App& app, int* exit_code);

}  // namespace bitdecoding::cli
