// SPDX-License-Identifier: Apache-2.0
// What the user asked of the demo.
#pragma once

#include <string>
#include <vector>

#include "tasks/plan.h"

namespace bitdecoding::eval {

struct DemoOptions {
  std::string root = ".";  // the repository
  std::string venv;        // default: ROOT/.venv
  std::string model;       // default: ROOT/out/models/SmolLM2-135M-Instruct
  std::string out;         // default: ROOT/out/demo
  std::string text = "/usr/share/common-licenses/GPL-3";
  std::vector<std::string> calibration_texts = {"/usr/share/common-licenses/MPL-2.0",
                                                "/usr/share/common-licenses/Apache-2.0"};
  std::vector<std::string> modes;
  std::string dtype;          // default: what the processor multiplies fast
  bool dtype_chosen = false;  // by fill_defaults
  std::int64_t cache_mib = 1024;
  int threads = 0;  // 0 = all cores that this process may use
  int start_timeout = 600;
  unsigned seed = 1;
  bool quick = false;
  bool fresh = false;
  bool keep_logits = false;
  std::string command;  // as typed, for the report
};

// Parses; true when the program should go on, else `exit_code` says how it ends.
bool parse_options(int argc, char** argv, DemoOptions* options, int* exit_code);

}  // namespace bitdecoding::eval
