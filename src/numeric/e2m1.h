// SPDX-License-Identifier: Apache-2.0
// E2M1, the 4-bit float of NVFP4 and MXFP4 (OCP Microscaling Formats v1.0, section 5.3.3):
// sign, two exponent bits (bias 1), one mantissa bit; no infinity, no NaN.
#pragma once

#include <array>
#include <cstdint>

#include "numeric/portable.h"

namespace bitdecoding {

inline constexpr float kE2m1Max = 6.0F;

// Value of code 0..15; bit 3 is the sign, so code 8 is -0.
inline constexpr std::array<float, 16> kE2m1Values = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                      4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                      -2.0F, -3.0F, -4.0F, -6.0F};

// Twice the value, an integer in -12..12: what integer dot products multiply.
inline constexpr std::array<std::int8_t, 16> kE2m1TwiceValues = {0, 1,  2,  3,  4,  6,  8,  12,
                                                                 0, -1, -2, -3, -4, -6, -8, -12};

BD_HOST_DEVICE constexpr float decode_e2m1(std::uint8_t code) {
  // Arithmetic instead of the table, so that devices need no constant memory.
  const int exponent = (code >> 1) & 3;
  const int mantissa = code & 1;
  const float magnitude = exponent == 0 ? 0.5F * static_cast<float>(mantissa)
                                        : static_cast<float>(1 << (exponent - 1)) *
                                              (1.0F + 0.5F * static_cast<float>(mantissa));
  return (code & 8) != 0 ? -magnitude : magnitude;
}

// Nearest code, ties to the even mantissa, saturating at +-6; the sign of a value that rounds to
// zero is kept (code 8). NaN gives code 0: callers count non-finite input before they get here.
BD_HOST_DEVICE constexpr std::uint8_t encode_e2m1(float x) {
  const bool negative = x < 0.0F || (x == 0.0F && __builtin_signbit(x));
  const float m = negative ? -x : x;
  // Each comparison is one decision point; ">" where the tie goes down, ">=" where it goes up.
  const int code = static_cast<int>(m > 0.25F) + static_cast<int>(m >= 0.75F) +
                   static_cast<int>(m > 1.25F) + static_cast<int>(m >= 1.75F) +
                   static_cast<int>(m > 2.5F) + static_cast<int>(m >= 3.5F) +
                   static_cast<int>(m > 5.0F);
  return static_cast<std::uint8_t>(code | (negative ? 8 : 0));
}

}  // namespace bitdecoding
