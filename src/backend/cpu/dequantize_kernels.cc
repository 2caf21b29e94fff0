// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/dequantize_kernels.h"

#include "backend/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/dequantize-inl.h"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/dequantize-inl.h"

#if HWY_ONCE
#include "backend/cpu/per_target.h"

namespace bitdecoding::cpu {

const DequantizeKernels* dequantize_kernels(std::int64_t target) {
  BITDECODING_PER_TARGET(target, get_dequantize_kernels);
  return nullptr;
}

}  // namespace bitdecoding::cpu
#endif
