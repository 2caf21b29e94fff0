// SPDX-License-Identifier: Apache-2.0
// What the subcommands that drive an engine share: the model, its recipe, its Python.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "bitdecoding/recipe.h"
#include "bitdecoding/status.h"

namespace bitdecoding::cli {

struct EngineOptions {
  std::string model;
  std::string mode = "bitdecoding-nvfp4";
  std::string recipe;  // a file instead of the mode
  std::string dtype;   // empty = what the processor multiplies fast
  std::string python;
  int threads = 0;  // 0 = all cores that this process may use
  int start_timeout = 600;
};

void add_engine_options(CLI::App* command, EngineOptions* options, bool with_recipe = true);

// The recipe as far as it is written down; key means come later.
Result<Recipe> engine_recipe(const EngineOptions& options);

// Of work that a signal may end: `status`'s exit code, or kExitInterrupted when one did.
// `goes_on`: whether the same command then goes on where it was.
int ended(const Status& status, bool goes_on);

// Absolute paths, the Python with vLLM and the plugin, and this machine's defaults.
Status complete(const EngineOptions& options, std::string* program, std::string* python,
                std::string* model, std::string* dtype, int* threads);

}  // namespace bitdecoding::cli
