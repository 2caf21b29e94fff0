// SPDX-License-Identifier: Apache-2.0
// Tensor-core and conversion instructions, one function each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bitdecoding::cuda {

__device__ inline std::uint32_t bits_of(__half2 h) { return *reinterpret_cast<std::uint32_t*>(&h); }
__device__ inline __half2 half2_of(std::uint32_t b) { return *reinterpret_cast<__half2*>(&b); }

// D = A (16 x 16, row) * B (16 x 8, column) + D in FP32.
__device__ inline void mma_f16(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit elements, two a lane, transposed across the warp.
__device__ inline std::uint32_t transpose8x8(std::uint32_t x) {
  std::uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ inline void load_matrix(std::uint32_t (&a)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}
__device__ inline void load_matrix_transposed(std::uint32_t (&a)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^n for n of a normal float.
__device__ inline float power_of_two(int n) {
  return __uint_as_float(static_cast<std::uint32_t>(n + 127) << 23);
}

// The outer scale of a KV head; null = 1.
__device__ inline float outer_of(const std::int8_t* exponents, int head) {
  return exponents == nullptr ? 1.0F : power_of_two(exponents[head]);
}

// 1 - 2 / (2^(2 x log2 e) + 1): relative error about 2^-21, unlike tanh.approx's 2^-11.
__device__ inline float tanh_fast(float x) {
  const float e = exp2_approx(2.885390082F * x);
  return 1.0F - __fdividef(2.0F, e + 1.0F);
}

// The two E4M3 in the low half of `bytes`, exactly; NaN stays NaN.
__device__ inline __half2 e4m3_pair(std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
  std::uint32_t both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(static_cast<unsigned short>(bytes)));
  return half2_of(both);
#else
  // An E4M3 without its sign at FP16's bits 7 to 13 is the value times 2^-8. Scales have no sign.
  const std::uint32_t spread = __byte_perm(bytes, 0, 0x1404) >> 1;
  __half2 x = __hmul2(half2_of(spread), half2_of(0x5C005C00U));  // 2^8
  if ((bytes & 0x7FU) == 0x7FU) x.x = __ushort_as_half(0x7E00);
  if ((bytes & 0x7F00U) == 0x7F00U) x.y = __ushort_as_half(0x7E00);
  return x;
#endif
}

// Two BF16, low half first, whose sum with the remainder pair `low` is the input to 2^-16.
__device__ inline std::uint32_t split_bf16(float x, float y, std::uint32_t* low) {
  const __nv_bfloat16 hx = __float2bfloat16_rn(x);
  const __nv_bfloat16 hy = __float2bfloat16_rn(y);
  const __nv_bfloat162 rest =
      __floats2bfloat162_rn(x - __bfloat162float(hx), y - __bfloat162float(hy));
  const __nv_bfloat162 high(hx, hy);
  *low = *reinterpret_cast<const std::uint32_t*>(&rest);
  return *reinterpret_cast<const std::uint32_t*>(&high);
}

}  // namespace bitdecoding::cuda
