// SPDX-License-Identifier: Apache-2.0
// Every code of every number format, every tie and every edge.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "numeric/bf16.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"

namespace bitdecoding {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

TEST(E2m1, EveryCode) {
  const float magnitudes[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  for (int code = 0; code < 16; ++code) {
    const float expected = code < 8 ? magnitudes[code] : -magnitudes[code - 8];
    const auto c = static_cast<std::uint8_t>(code);
    EXPECT_EQ(bits(decode_e2m1(c)), bits(expected)) << code;
    EXPECT_EQ(bits(kE2m1Values[static_cast<std::size_t>(code)]), bits(expected)) << code;
    EXPECT_EQ(static_cast<float>(kE2m1TwiceValues[static_cast<std::size_t>(code)]), 2 * expected);
    EXPECT_EQ(encode_e2m1(expected), code);
  }
}

TEST(E2m1, EveryTieGoesToTheEvenMantissa) {
  const float ties[7] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  const int codes[7] = {0, 2, 2, 4, 4, 6, 6};  // values 0, 1, 1, 2, 2, 4, 4
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(encode_e2m1(ties[i]), codes[i]);
    EXPECT_EQ(encode_e2m1(-ties[i]), codes[i] + 8);
    EXPECT_EQ(encode_e2m1(std::nextafter(ties[i], 0.0F)), i);
    EXPECT_EQ(encode_e2m1(std::nextafter(ties[i], kInf)), i + 1);
  }
}

TEST(E2m1, EdgesSaturateAndKeepTheSign) {
  EXPECT_EQ(encode_e2m1(6.0F), 7);
  EXPECT_EQ(encode_e2m1(std::numeric_limits<float>::max()), 7);
  EXPECT_EQ(encode_e2m1(kInf), 7);
  EXPECT_EQ(encode_e2m1(-kInf), 15);
  EXPECT_EQ(encode_e2m1(-0.0F), 8);
  EXPECT_EQ(encode_e2m1(-1e-38F), 8);
  EXPECT_EQ(encode_e2m1(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(encode_e2m1(kNan), 0);
}

TEST(E2m1, NearestOfAllCodes) {
  for (int i = -7000; i <= 7000; ++i) {
    const float x = static_cast<float>(i) / 1000.0F;
    const float got = decode_e2m1(encode_e2m1(x));
    float best = kInf;
    for (const float v : kE2m1Values) best = std::min(best, std::fabs(v - x));
    EXPECT_EQ(std::fabs(got - x), best) << x;
  }
}

// The definition, in double precision: sign, exponent, mantissa.
double e4m3_value(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? mantissa * 0x1p-9 : (8 + mantissa) * std::ldexp(1.0, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(E4m3, EveryCodeRoundTrips) {
  for (int code = 0; code < 256; ++code) {
    const auto c = static_cast<std::uint8_t>(code);
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(decode_e4m3(c)));
      EXPECT_TRUE(is_nan_e4m3(c));
      EXPECT_TRUE(is_nan_e4m3(encode_e4m3(decode_e4m3(c))));
      continue;
    }
    EXPECT_FALSE(is_nan_e4m3(c));
    EXPECT_EQ(bits(decode_e4m3(c)), bits(static_cast<float>(e4m3_value(code)))) << code;
    EXPECT_EQ(encode_e4m3(decode_e4m3(c)), code);
  }
  EXPECT_EQ(decode_e4m3(0x7E), 448.0F);
  EXPECT_EQ(decode_e4m3(0x01), 0x1p-9F);
  EXPECT_EQ(bits(decode_e4m3(0x80)), bits(-0.0F));
}

TEST(E4m3, EveryTieGoesToTheEvenCode) {
  for (int code = 0; code < 0x7E; ++code) {
    const auto tie = static_cast<float>((e4m3_value(code) + e4m3_value(code + 1)) / 2);
    EXPECT_EQ(encode_e4m3(tie), code % 2 == 0 ? code : code + 1) << code;
    EXPECT_EQ(encode_e4m3(std::nextafter(tie, 0.0F)), code);
    EXPECT_EQ(encode_e4m3(std::nextafter(tie, kInf)), code + 1);
    EXPECT_EQ(encode_e4m3(-tie), (code % 2 == 0 ? code : code + 1) | 0x80);
  }
}

TEST(E4m3, OverflowSaturates) {
  const int codes[7] = {0x78, 0x79, 0x7A, 0x7B, 0x7C, 0x7D, 0x7E};
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(encode_e4m3(256.0F + 32.0F * static_cast<float>(i)), codes[i]);
  }
  for (const float x : {449.0F, 464.0F, 480.0F, 1e9F, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(encode_e4m3(x), 0x7E);
    EXPECT_EQ(encode_e4m3(-x), 0xFE);
  }
  EXPECT_EQ(encode_e4m3(kNan), 0x7F);
  EXPECT_EQ(encode_e4m3(-kNan), 0xFF);
  EXPECT_EQ(encode_e4m3(0x1p-10F), 0);  // a tie with zero
  EXPECT_EQ(encode_e4m3(std::nextafter(0x1p-10F, 1.0F)), 1);
  EXPECT_EQ(encode_e4m3(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(E8m0, EveryCode) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(bits(decode_e8m0(static_cast<std::uint8_t>(code))),
              bits(std::ldexp(1.0F, code - 127)));
    EXPECT_EQ(encode_e8m0_exponent(code - 127), code);
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(0xFF)));
  EXPECT_EQ(encode_e8m0_exponent(-1000), 0);
  EXPECT_EQ(encode_e8m0_exponent(1000), 0xFE);
}

TEST(E8m0, FloorLog2) {
  for (int e = -149; e <= 127; ++e) {
    const float x = std::ldexp(1.0F, e);
    EXPECT_EQ(floor_log2(x), e);
    if (e > -149) {
      EXPECT_EQ(floor_log2(std::nextafter(x, 0.0F)), e - 1);
    }
  }
  EXPECT_EQ(floor_log2(std::numeric_limits<float>::max()), 127);
}

TEST(Bf16, EveryCodeRoundTrips) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const auto c = static_cast<std::uint16_t>(code);
    const float x = decode_bf16(c);
    EXPECT_EQ(bits(x), code << 16);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(decode_bf16(encode_bf16(x))));
    } else {
      EXPECT_EQ(encode_bf16(x), c);
    }
  }
}

TEST(Bf16, EveryTieGoesToEven) {
  for (std::uint32_t code = 0; code < 0x7F80; ++code) {
    const float tie = std::bit_cast<float>((code << 16) | 0x8000U);
    EXPECT_EQ(encode_bf16(tie), code + (code & 1U));
    EXPECT_EQ(encode_bf16(std::nextafter(tie, 0.0F)), code);
  }
  EXPECT_EQ(encode_bf16(std::numeric_limits<float>::max()), 0x7F80);  // infinity
  EXPECT_EQ(encode_bf16(-kInf), 0xFF80);
}

TEST(F16, EveryCodeRoundTrips) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const auto c = static_cast<std::uint16_t>(code);
    const float x = decode_f16(c);
    if ((code & 0x7C00U) == 0x7C00U && (code & 0x3FFU) != 0) {
      EXPECT_TRUE(std::isnan(x));
      EXPECT_TRUE(std::isnan(decode_f16(encode_f16(x))));
      continue;
    }
    EXPECT_EQ(encode_f16(x), c);
  }
  EXPECT_EQ(decode_f16(0x3C00), 1.0F);
  EXPECT_EQ(decode_f16(0x0001), 0x1p-24F);
  EXPECT_EQ(decode_f16(0x7BFF), 65504.0F);
}

TEST(F16, TiesGoToEvenAndOverflowToInfinity) {
  for (std::uint32_t code = 0; code < 0x7BFF; ++code) {
    const double low = decode_f16(static_cast<std::uint16_t>(code));
    const double high = decode_f16(static_cast<std::uint16_t>(code + 1));
    EXPECT_EQ(encode_f16(static_cast<float>((low + high) / 2)), code + (code & 1U));
  }
  EXPECT_EQ(encode_f16(65519.0F), 0x7BFF);
  EXPECT_EQ(encode_f16(65520.0F), 0x7C00);
  EXPECT_EQ(encode_f16(-1e9F), 0xFC00);
  // The same 16 bits are another number in the other type: a mistaken type cannot pass unseen.
  EXPECT_NEAR(decode_bf16(0x3E25), 0.161, 1e-3);
  EXPECT_NEAR(decode_f16(0x3E25), 1.536, 1e-3);
}

}  // namespace
}  // namespace bitdecoding
