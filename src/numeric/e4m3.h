// SPDX-License-Identifier: Apache-2.0
// E4M3 (OCP 8-bit Floating Point Specification, revision 1.0, "E4M3"): bias 7, largest 448, no
// infinity, NaN 0x7F and 0xFF, subnormal step 2^-9. Block scales use the non-negative half.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "numeric/portable.h"

namespace bitdecoding {

inline constexpr float kE4m3Max = 448.0F;
inline constexpr std::uint8_t kE4m3MaxCode = 0x7E;
inline constexpr std::uint8_t kE4m3Nan = 0x7F;

BD_HOST_DEVICE constexpr bool is_nan_e4m3(std::uint8_t code) { return (code & 0x7F) == 0x7F; }

BD_HOST_DEVICE constexpr float decode_e4m3(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7FU;
  const std::uint32_t sign = (code & 0x80U) << 24;
  if (magnitude == 0x7FU) return std::bit_cast<float>(0x7FC00000U | sign);
  if (magnitude < 8U) {  // subnormal: magnitude * 2^-9, exact
    const float value = static_cast<float>(magnitude) * (1.0F / 512.0F);
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
  }
  // Four exponent and three mantissa bits move to float's places; the bias grows by 120.
  return std::bit_cast<float>(((magnitude << 20) + (120U << 23)) | sign);
}

// Round to nearest even; every finite overflow and infinity saturates to 448; NaN stays NaN.
BD_HOST_DEVICE constexpr std::uint8_t encode_e4m3(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<std::uint8_t>(0x7FU | sign);
  if (magnitude < (121U << 23)) {  // below 2^-6: a multiple of 2^-9
    // Adding 2^23 leaves no fraction bits, so float's own rounding to even does the work.
    const float scaled = std::bit_cast<float>(magnitude) * 512.0F;
    const float rounded = (scaled + 8388608.0F) - 8388608.0F;
    return static_cast<std::uint8_t>(static_cast<std::uint32_t>(rounded) | sign);
  }
  const std::uint32_t rounded = magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U);
  const std::uint32_t code = (rounded >> 20) - (120U << 3);
  return static_cast<std::uint8_t>((code > kE4m3MaxCode ? kE4m3MaxCode : code) | sign);
}

}  // namespace bitdecoding
