// SPDX-License-Identifier: Apache-2.0
// Maximum, errors and codes of a block on a device: the same bits as scale/block.h, without a
// division or a branch for each value. Tested on hosts, too (tests/device_block_test.cc).
//
// Errors. y = m * (1 / s) is within 2^-22 of the quotient, so it rounds to the reference's code or,
// when the quotient lies next to a decision point, to the neighbour across that point. With r the
// rounded y and h half the step at y, d = m - r * s is exact (m and r * s are within a factor of
// two, or r is 0), and |d| > h * s tells that it is the neighbour: the reference's error is then
// 2 h s - |d|, exact as well. At the point itself both errors are the same. Above 6 there is no
// neighbour.
//
// Rounding is one addition: with e the exponent of y, at least 0, codes are multiples of
// 2^(e - 1), and 1.5 * 2^(22 + e) + y has no bits below that.
//
// Codes. A decision point has at most three bits, so its product with a scale of 2^-140 or more is
// exact, and a code is found by three comparisons. (The float nearest to m / s is on the same side
// of a point c as m / s itself, or both are c: c and c * s have too few bits for a rounding to
// reach c.)
#pragma once

#include <cstdint>
#include <limits>

#include "scale/block.h"

namespace bitdecoding::cuda {

// NaN when either is.
__device__ inline float maximum(float a, float b) {
#if defined(__CUDA_ARCH__)
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return a != a || b != b ? a + b : fmaxf(a, b);
#endif
}

// Of kN values; the rules pass the same number again.
template <int kN>
struct FastBlock {
  // Largest magnitude; NaN when a value is NaN.
  __device__ static float largest(const float* x) {
    return fold(
        x, [](float a) { return fabsf(a); }, [](float a, float b) { return maximum(a, b); });
  }
  // The same at most float's largest number; NaN is passed over.
  __device__ static float amax(const float* x, int) {
    const float top = fold(
        x, [](float a) { return fabsf(a); }, [](float a, float b) { return fmaxf(a, b); });
    // Of NaN alone the maximum is NaN, and block_amax's is zero.
    return fminf(fmaxf(top, 0.0F), std::numeric_limits<float>::max());
  }

  __device__ static float squared_error(const float* x, int, float scale) {
    const float inverse = __frcp_rn(scale);
    return amax(x, kN) * inverse < 6.99F ? errors<false>(x, scale, inverse)
                                         : errors<true>(x, scale, inverse);
  }
  __device__ static float squared_norm(const float* x, int) {
    return fold(
        x, [](float a) { return __fmul_rn(a, a); }, Add());
  }

  // Magnitude codes and signs, bit 8 * (i % 4) + 0..3 of word i / 4. Zero is positive or negative
  // as the value is. Under a scale of zero all codes are zero, signs included.
  __device__ static void encode(const float* x, float scale, std::uint32_t (&bytes)[kN / 4]) {
    const float p0 = 0.25F * scale;
    const float p1 = 0.75F * scale;
    const float p2 = 1.25F * scale;
    const float p3 = 1.75F * scale;
    const float p4 = 2.5F * scale;
    const float p5 = 3.5F * scale;
    const float p6 = 5.0F * scale;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float m = fabsf(x[i]);
      const int at = 8 * (i % 4);
      std::uint32_t& word = bytes[i / 4];
      if (i % 4 == 0) word = 0;
      // At a point the even code wins: upper for .75, 1.75 and 3.5, lower for the others.
      const bool high = m >= p3;
      const bool middle = m >= (high ? p5 : p1);
      const float upper = high ? p6 : p2;
      const float lower = high ? p4 : p0;
      if (high) word |= 4U << at;
      if (middle) word |= 2U << at;
      if (m > (middle ? upper : lower)) word |= 1U << at;
      if (static_cast<std::int32_t>(__float_as_uint(x[i])) < 0) word |= 8U << at;
    }
    if (scale != 0.0F) return;
#pragma unroll
    for (std::uint32_t& word : bytes) word = 0;
  }

 private:
  // kClips: quotients may be above 7. Below 2^-128 a scale's inverse is infinity, and quotients are
  // taken for 6: errors of values that small are zero as squares, whatever their codes.
  template <bool kClips>
  __device__ static float errors(const float* x, float scale, float inverse) {
    const float half_scale = 0.5F * scale;
    float sum[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float m = fabsf(x[i]);
      float y = __fmul_rn(m, inverse);
      if constexpr (kClips) y = fminf(y, 6.0F);
      const std::uint32_t exponent = max(__float_as_uint(y) & 0x7F800000U, 0x3F800000U);
      const float magic = __uint_as_float(exponent + (22U << 23) + 0x400000U);
      const float rounded = __fsub_rn(__fadd_rn(y, magic), magic);
      const float d = __fmaf_rn(-rounded, scale, m);
      const float across = __fsub_rn(__fmul_rn(__uint_as_float(exponent), half_scale), fabsf(d));
      float error = fminf(fabsf(d), across);
      if constexpr (kClips) error = rounded == 6.0F && d > 0.0F ? d : error;
      sum[i] = error;
    }
    return squared_norm(sum, kN);
  }

  struct Add {
    __device__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
  };
  // As a balanced tree that halves the block: the order of block_squared_error.
  template <class Each, class Join>
  __device__ static float fold(const float* x, Each each, Join join) {
    float y[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) y[i] = each(x[i]);
    fold_halves<kN / 2>(y, join);
    return y[0];
  }
  // A loop over halves is not unrolled, and its array would be in memory.
  template <int kHalf, class Join>
  __device__ static void fold_halves(float (&y)[kN], Join join) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) y[i] = join(y[i], y[i + kHalf]);
    if constexpr (kHalf > 1) fold_halves<kHalf / 2>(y, join);
  }
};

// Eight codes as bytes, four in each word, to a word of kFp16Mma (layout::fragment_code).
__device__ inline std::uint32_t pack_codes(std::uint32_t low, std::uint32_t high) {
  return ((low & 0x08080808U) << 4) | ((low & 0x07070707U) << 1) | ((high & 0x0E0E0E0EU) << 3) |
         (high & 0x01010101U);
}

}  // namespace bitdecoding::cuda
