// SPDX-License-Identifier: Apache-2.0
// Whether AMX can be used here.
#include "backend/cpu/matrix_kernels.h"

#if defined(BITDECODING_AMX)
#include <sys/syscall.h>
#include <unistd.h>

namespace bitdecoding::cpu {
namespace {

bool machine_has_amx() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bf16")) {
    return false;
  }
  unsigned eax = 7;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  constexpr unsigned kAmxBf16 = 1U << 22;
  constexpr unsigned kAmxTile = 1U << 24;
  return (edx & kAmxBf16) != 0 && (edx & kAmxTile) != 0;
}

}  // namespace

bool amx_usable() {
  // Linux gives the tile registers' state to a process that asks for it.
  static const bool usable = [] {
    constexpr int kArchReqXcompPerm = 0x1023;
    constexpr int kXfeatureXtiledata = 18;
    return machine_has_amx() && syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
  }();
  return usable;
}

}  // namespace bitdecoding::cpu

#else

namespace bitdecoding::cpu {

bool amx_usable() { return false; }
const MatrixKernels* amx_kernels() { return nullptr; }

}  // namespace bitdecoding::cpu

#endif
