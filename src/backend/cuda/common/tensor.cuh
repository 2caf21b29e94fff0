// SPDX-License-Identifier: Apache-2.0
// Elements of borrowed tensors, of any dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "bitdecoding/format.h"

namespace bitdecoding::cuda {

__device__ inline float load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(data)[index]);
  }
  return 0.0F;
}

__device__ inline void store_element(void* data, DType dtype, std::int64_t index, float x) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[index] = x;
      break;
    case DType::kBf16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(x);
      break;
    case DType::kF16:
      static_cast<__half*>(data)[index] = __float2half_rn(x);
      break;
  }
}

}  // namespace bitdecoding::cuda
