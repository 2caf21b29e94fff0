// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/decode_kernels.h"

// VPDPBUSD is worth a target of its own here.
#define BITDECODING_CPU_WITH_DOTS
#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/decode-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/decode-inl.h"

#if HWY_ONCE
#include "backend/cpu/per_target.h"

namespace bitdecoding::cpu {

const DecodeKernels* decode_kernels(std::int64_t target) {
  BITDECODING_PER_TARGET(target, get_decode_kernels);
  return nullptr;
}

}  // namespace bitdecoding::cpu
#endif
