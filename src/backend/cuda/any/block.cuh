// SPDX-License-Identifier: Apache-2.0
// Errors and codes of a block on a device, the same bits as scale/block.h without a division a
// value.
//
// The reference rounds the float nearest to m / s. Here y = m * (1 / s) is within 2^-22 of the true
// quotient, so it rounds to the same code unless the quotient lies that close to a decision point
// c; there m is compared with c * s, which is exact. (The float nearest to m / s is on the same
// side of c as m / s itself, or both are c: c and c * s have too few bits for a rounding to reach
// c.) Rounding itself is one addition: with e the exponent of y, at least 0, codes are multiples of
// 2^(e - 1), and 1.5 * 2^(22 + e) + y has no bits below that.
#pragma once

#include <cstdint>

namespace bitdecoding::cuda {

struct Rounded {
  float value;         // of the code, without sign
  std::uint32_t code;  // 0..7
};

__device__ inline Rounded round_quotient(float y) {
  const std::uint32_t exponent = max(__float_as_uint(y) & 0x7F800000U, 0x3F800000U);
  const float magic = __uint_as_float((exponent + (22U << 23)) | 0x400000U);
  const float sum = __fadd_rn(y, magic);
  return {__fsub_rn(sum, magic), (__float_as_uint(sum) & 7U) + ((exponent - 0x3F800000U) >> 22)};
}

// Half a step at y: the distance of a decision point from its code.
__device__ inline float half_step(float y) {
  return __uint_as_float(max(__float_as_uint(y) & 0x7F800000U, 0x3F800000U) - (2U << 23));
}

__device__ inline Rounded round_magnitude(float m, float scale, float inverse) {
  const float y = fminf(__fmul_rn(m, inverse), 6.0F);
  Rounded fast = round_quotient(y);
  const float half = half_step(y);
  // 2^-18 of a step is well above the quotient's error of 2^-22 at y / step <= 4.
  if (fabsf(__fsub_rn(fabsf(__fsub_rn(y, fast.value)), half)) <= half * 0x1p-17F) {
    const float point = y > fast.value ? fast.value + half : fast.value - half;
    const float exact = __fmul_rn(point, scale);  // at most three bits times four
    fast = round_quotient(m > exact   ? point + 0.5F * half
                          : m < exact ? point - 0.5F * half
                                      : point);
  }
  return fast;
}

// Of kN values; the rules pass the same number again.
template <int kN>
struct FastBlock {
  __device__ static float squared_error(const float* x, int, float scale) {
    const float inverse = __frcp_rn(scale);
    float sum[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const Rounded r = round_magnitude(fabsf(x[i]), scale, inverse);
      // The product is exact, so one rounding is the reference's one rounding.
      const float d = __fmaf_rn(-r.value, scale, fabsf(x[i]));
      sum[i] = __fmul_rn(d, d);
    }
    return tree(sum);
  }
  __device__ static float squared_norm(const float* x, int) {
    float sum[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      sum[i] = __fmul_rn(x[i], x[i]);
    }
    return tree(sum);
  }
  // Code with its sign; the sign of a value that rounds to zero is kept.
  __device__ static std::uint32_t encode(float x, float scale, float inverse) {
    return round_magnitude(fabsf(x), scale, inverse).code | ((__float_as_uint(x) >> 28) & 8U);
  }

 private:
  __device__ static float tree(float (&sum)[kN]) {
#pragma unroll
    for (int half = kN / 2; half >= 1; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) sum[i] = __fadd_rn(sum[i], sum[i + half]);
    }
    return sum[0];
  }
};

}  // namespace bitdecoding::cuda
