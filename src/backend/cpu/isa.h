// SPDX-License-Identifier: Apache-2.0
// The instruction sets that the CPU backend is compiled for, by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::cpu {

struct Isa {
  // Highway's name of the target: "AVX3_DL" (AVX-512 with VNNI and VBMI), "AVX3" (AVX-512), "AVX2",
  // "SSSE3", "NEON"; "AMX" is AVX3_DL with the matrix unit.
  const char* name;
  std::int64_t target;         // Highway's target bit
  std::int64_t decode_target;  // the decode kernels'
  bool matrix;
};

// Compiled and supported by this machine, best first.
std::vector<Isa> supported_isas();
// The best when `name` is empty; kInvalidArgument lists the names that work here.
Result<Isa> choose_isa(std::string_view name);

}  // namespace bitdecoding::cpu
