// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/isa.h"

#include <fmt/format.h>

#include "backend/cpu/matrix_kernels.h"
#define BITDECODING_CPU_WITH_DOTS
#include "backend/cpu/targets.h"
// After targets.h, which decides what Highway may compile.
#include <hwy/highway.h>

namespace bitdecoding::cpu {

std::vector<Isa> supported_isas() {
  static constexpr Isa kCompiled[] = {
#if (HWY_TARGETS & HWY_AVX3) && (HWY_TARGETS & HWY_AVX3_DL)
    {"AMX", HWY_AVX3, HWY_AVX3_DL, true},
    {"AVX3_DL", HWY_AVX3, HWY_AVX3_DL, false},
#endif
#if HWY_TARGETS & HWY_AVX3
    {"AVX3", HWY_AVX3, HWY_AVX3, false},
#endif
#if HWY_TARGETS & HWY_AVX2
    {"AVX2", HWY_AVX2, HWY_AVX2, false},
#endif
#if HWY_TARGETS & HWY_SSSE3
    {"SSSE3", HWY_SSSE3, HWY_SSSE3, false},
#endif
#if HWY_TARGETS & HWY_NEON
    {"NEON", HWY_NEON, HWY_NEON, false},
#endif
  };
  const std::int64_t machine = hwy::SupportedTargets();
  std::vector<Isa> isas;
  for (const Isa& isa : kCompiled) {
    if (((isa.target | isa.decode_target) & ~machine) != 0 || (isa.matrix && !amx_usable()))
      continue;
    isas.push_back(isa);
  }
  return isas;
}

Result<Isa> choose_isa(std::string_view name) {
  const std::vector<Isa> isas = supported_isas();
  if (isas.empty()) {
    return Status(
        StatusCode::kUnsupported,
        "this CPU has none of the instruction sets the cpu backend is built for (SSSE3, AVX2, "
        "AVX-512 on x86, NEON on Arm); use the backend 'reference'");
  }
  if (name.empty()) return isas.front();
  std::string known;
  for (const Isa& isa : isas) {
    if (name == isa.name) return isa;
    known += (known.empty() ? "" : ", ") + std::string(isa.name);
  }
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("unknown instruction set '{}' for the cpu backend; this machine runs {}", name,
                  known));
}

}  // namespace bitdecoding::cpu
