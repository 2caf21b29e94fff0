// SPDX-License-Identifier: Apache-2.0
// What this machine has, as far as serving is concerned: read from the kernel, nothing is run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bitdecoding::cli {

struct CpuFacts {
  std::string model;
  int online = 0;
  int usable = 0;                 // in this process's affinity mask
  bool bf16_matrix = false;       // AVX512-BF16, AMX-BF16 or Arm's BF16 instructions
  std::vector<std::string> isas;  // of the library, best first
};

CpuFacts cpu_facts();
std::int64_t memory_bytes();      // installed, or the control group's limit if that is less
std::string huge_page_setting();  // "always", "madvise", "never"; empty = unknown
std::string cuda_device();        // what says that there is one; empty = none

// A Python and what its site-packages hold.
struct PythonFacts {
  std::string python;         // path of the interpreter; empty = none found
  std::string vllm_version;   // empty = not installed
  bool vllm_command = false;  // `vllm serve` works: its distribution is called vllm
  bool plugin = false;
};

// `wanted` (a path), else BITDECODING_PYTHON, VIRTUAL_ENV, .venv here, .venv beside the program's
// source tree, python3 of PATH: the first that exists.
PythonFacts python_facts(const std::string& wanted);

}  // namespace bitdecoding::cli
