// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/float_kernels.h"

#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/float-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/float-inl.h"

#if HWY_ONCE
#include "backend/cpu/per_target.h"

namespace bitdecoding::cpu {

const FloatKernels* float_kernels(std::int64_t target) {
  BITDECODING_PER_TARGET(target, get_float_kernels);
  return nullptr;
}

}  // namespace bitdecoding::cpu
#endif
