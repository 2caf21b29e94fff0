// SPDX-License-Identifier: Apache-2.0
// E8M0 (OCP Microscaling Formats v1.0, section 5.4.1): the value of code e is 2^(e-127); 0xFF is
// NaN and is never produced.
#pragma once

#include <bit>
#include <cstdint>

#include "numeric/portable.h"

namespace bitdecoding {

inline constexpr std::uint8_t kE8m0Nan = 0xFF;
inline constexpr std::uint8_t kE8m0MaxCode = 0xFE;
inline constexpr int kE8m0Bias = 127;

BD_HOST_DEVICE constexpr float decode_e8m0(std::uint8_t code) {
  if (code == kE8m0Nan) return std::bit_cast<float>(0x7FC00000U);
  if (code == 0) return std::bit_cast<float>(0x00400000U);  // 2^-127 is a float subnormal
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 23);
}

// Code of 2^exponent, saturating to the ends of the range.
BD_HOST_DEVICE constexpr std::uint8_t encode_e8m0_exponent(int exponent) {
  const int code = exponent + kE8m0Bias;
  return static_cast<std::uint8_t>(code < 0 ? 0 : (code > kE8m0MaxCode ? kE8m0MaxCode : code));
}

// floor(log2(x)) of a positive finite float, subnormals included.
BD_HOST_DEVICE constexpr int floor_log2(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (bits >= (1U << 23)) return static_cast<int>(bits >> 23) - 127;
  int exponent = -127;
  for (std::uint32_t mantissa = bits; mantissa < (1U << 22); mantissa <<= 1) --exponent;
  return exponent;
}

}  // namespace bitdecoding
