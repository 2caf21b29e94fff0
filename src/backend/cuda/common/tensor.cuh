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

// kN neighbouring elements. All loads are under way before the first is used: one decision for the
// dtype, not one for each element.
template <int kN>
__device__ inline void load_elements(const void* data, DType dtype, std::int64_t index,
                                     float (&x)[kN]) {
  if (dtype == DType::kF32) {
    const float* from = static_cast<const float*>(data) + index;
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = from[i];
    return;
  }
  std::uint16_t bits[kN];
  const std::uint16_t* from = static_cast<const std::uint16_t*>(data) + index;
#pragma unroll
  for (int i = 0; i < kN; ++i) bits[i] = from[i];
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    x[i] = dtype == DType::kBf16 ? __uint_as_float(static_cast<std::uint32_t>(bits[i]) << 16)
                                 : __half2float(__ushort_as_half(bits[i]));
  }
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
