// SPDX-License-Identifier: Apache-2.0
// BF16 and IEEE half: conversions with round to nearest even.
#pragma once

#include <bit>
#include <cstdint>

#include "numeric/portable.h"

namespace bitdecoding {

BD_HOST_DEVICE constexpr float decode_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// NaN stays NaN (quieted); overflow becomes infinity, as IEEE rounding says.
BD_HOST_DEVICE constexpr std::uint16_t encode_bf16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

BD_HOST_DEVICE constexpr float round_to_bf16(float x) { return decode_bf16(encode_bf16(x)); }

BD_HOST_DEVICE constexpr float decode_f16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1FU;
  const std::uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0x1FU) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * (1.0F / 16777216.0F);  // 2^-24
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
}

BD_HOST_DEVICE constexpr std::uint16_t encode_f16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (magnitude < (113U << 23)) {  // below 2^-14: a multiple of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 16777216.0F;
    const float rounded = (scaled + 8388608.0F) - 8388608.0F;
    return static_cast<std::uint16_t>(static_cast<std::uint32_t>(rounded) | sign);
  }
  const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
  const std::uint32_t code = (rounded >> 13) - (112U << 10);
  return static_cast<std::uint16_t>((code > 0x7C00U ? 0x7C00U : code) | sign);
}

}  // namespace bitdecoding
