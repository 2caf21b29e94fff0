// SPDX-License-Identifier: Apache-2.0
// From a mode, a recipe and this machine to one command line: the only place that knows which flags
// of vLLM a mode needs.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bitdecoding/status.h"
#include "machine.h"

namespace bitdecoding::cli {

struct ServeOptions {
  std::string model;
  std::string mode;       // empty = the recipe's, or bitdecoding-nvfp4
  std::string recipe;     // a file; empty = the mode's preset
  std::string key_shift;  // a sidecar; empty = the recipe's, or the one in the model's folder
  std::string calibrate;  // where to write key means; empty = off
  std::string python;
  std::vector<std::string> extra;  // further flags of vLLM
  bool dry_run = false;
  bool json = false;
};

struct ServeCommand {
  std::vector<std::string> argv;
  std::string recipe_json;  // BITDECODING_RECIPE; empty = unset (vLLM's own cache)
  std::vector<std::pair<std::string, std::string>> environment;  // further variables
  std::vector<std::string> notes;                                // choices that were made, in words
};

// vLLM's own cache in the model's dtype, beside the library's modes: what they are compared with.
inline constexpr const char* kStockMode = "stock";

// Modes that can be served on this machine's CPU, for help and completion.
std::vector<std::string> served_modes();

Result<ServeCommand> make_serve_command(const ServeOptions& options, const PythonFacts& python,
                                        bool bf16_matrix);

// The command as a line that a shell reads back as the same words.
std::string shell_line(const ServeCommand& command);

}  // namespace bitdecoding::cli
