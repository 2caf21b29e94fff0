// SPDX-License-Identifier: Apache-2.0
// Whether this processor multiplies BF16 matrices fast: what decides a model's dtype on CPU.
#pragma once

#include <string>

namespace bitdecoding::cli {

// `cpuinfo` is the text of /proc/cpuinfo: AVX512-BF16, AMX-BF16 or Arm's BF16 instructions.
bool has_bf16_matrix(const std::string& cpuinfo);
// Of this machine.
bool has_bf16_matrix();

}  // namespace bitdecoding::cli
