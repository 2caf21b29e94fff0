// SPDX-License-Identifier: Apache-2.0
// From codes and block scales of the kFp16Mma order to FP16 operands (page/layout.h has the bits).
// All products are exact: code * 2^-14 has three significant bits, an E4M3 scale four.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "bitdecoding/format.h"
#include "common/mma.cuh"

namespace bitdecoding::cuda {

// Eight codes, columns 0..7 in natural order, as four pairs; values times 2^-14.
__device__ inline void unpack_word(std::uint32_t word, std::uint32_t (&pairs)[4]) {
  const std::uint32_t low = word & 0x8E8E8E8EU;
  const std::uint32_t high = ((word << 1) & 0x82828282U) | ((word >> 2) & 0x0C0C0C0CU);
  pairs[0] = __byte_perm(low, 0, 0x1404);
  pairs[1] = __byte_perm(low, 0, 0x3424);
  pairs[2] = __byte_perm(high, 0, 0x1404);
  pairs[3] = __byte_perm(high, 0, 0x3424);
}

// The scales of a lane's four words, each in both halves: [row g, row g + 8][columns 0-31, 32-63],
// times 2^(14 + kExponent), so that code and scale together are value * 2^kExponent.
struct LaneScales {
  __half2 of[2][2];
};

template <Format kFormat>
struct Scales;

template <>
struct Scales<Format::kNvfp4> {
  static constexpr int kBytesPerFragment = 64;
  static constexpr int kExponent = -7;  // 448 * 2^7 is the largest that FP16 holds
  // Byte of a lane's word inside the fragment's scales.
  __device__ static int word_offset(int lane) { return 4 * (2 * (lane >> 2) + ((lane & 3) >> 1)); }
  // Scale bytes that belong to the 16-token groups named by `groups` (bit i: tokens 16 i ..).
  __device__ static std::uint32_t value_mask(unsigned groups, int lane) {
    const int h = (lane & 3) >> 1;
    const std::uint32_t half0 = ((groups >> h) & 1U) != 0 ? 0x00FFU : 0U;
    const std::uint32_t half1 = ((groups >> (2 + h)) & 1U) != 0 ? 0xFF00U : 0U;
    return (half0 | half1) * 0x00010001U;
  }
  __device__ static LaneScales decode(std::uint32_t word) {
    const __half2 factor = half2_of(0x58005800U);  // 2^7
    LaneScales s;
#pragma unroll
    for (int up = 0; up < 2; ++up) {
      const __half2 x = __hmul2(e4m3_pair(up == 0 ? word : word >> 16), factor);
      s.of[up][0] = __low2half2(x);
      s.of[up][1] = __high2half2(x);
    }
    return s;
  }
};

template <>
struct Scales<Format::kMxfp4> {
  static constexpr int kBytesPerFragment = 32;
  static constexpr int kExponent = -7;
  __device__ static int word_offset(int lane) { return 4 * (lane >> 2); }
  __device__ static std::uint32_t value_mask(unsigned groups, int) {
    return ((groups & 3U) != 0 ? 0x00FF00FFU : 0U) | ((groups & 12U) != 0 ? 0xFF00FF00U : 0U);
  }
  // 2^(e - 127) * 2^7. Exact for block scales of 2^-16 to 2^8; below, values round to multiples of
  // 2^-17; scales above saturate at 2^8 (values of 1,536 and more: an outer scale is for those).
  // 0xFF is NaN.
  __device__ static __half2 one(std::uint32_t e) {
    const int exponent = static_cast<int>(e) - 127 + 7 + 15;
    std::uint32_t bits = exponent > 0 ? static_cast<std::uint32_t>(min(exponent, 30)) << 10
                                      : (exponent < -9 ? 0U : 0x400U >> (1 - exponent));
    if (e == 255U) bits = 0x7E00U;
    return half2_of(bits | (bits << 16));
  }
  __device__ static LaneScales decode(std::uint32_t word) {
    LaneScales s;
#pragma unroll
    for (int i = 0; i < 4; ++i) s.of[i >> 1][i & 1] = one((word >> (8 * i)) & 255U);
    return s;
  }
};

// A operands of the two MMA steps over 32 columns: words of rows g and g + 8.
__device__ inline void operand_pair(std::uint32_t upper, std::uint32_t lower, __half2 upper_scale,
                                    __half2 lower_scale, std::uint32_t (&a)[2][4]) {
  std::uint32_t u[4];
  std::uint32_t l[4];
  unpack_word(upper, u);
  unpack_word(lower, l);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    a[step][0] = bits_of(__hmul2(half2_of(u[2 * step]), upper_scale));
    a[step][1] = bits_of(__hmul2(half2_of(l[2 * step]), lower_scale));
    a[step][2] = bits_of(__hmul2(half2_of(u[2 * step + 1]), upper_scale));
    a[step][3] = bits_of(__hmul2(half2_of(l[2 * step + 1]), lower_scale));
  }
}

}  // namespace bitdecoding::cuda
