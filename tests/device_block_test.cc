// SPDX-License-Identifier: Apache-2.0
// The CUDA writer's arithmetic of a block (backend/cuda/any/block.cuh) against scale/block.h, bit
// for bit, on the host: its intrinsics are single IEEE operations, which a host has, too.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace {

using std::max;
float __frcp_rn(float x) { return 1.0F / x; }
float __fmul_rn(float a, float b) { return a * b; }
float __fadd_rn(float a, float b) { return a + b; }
float __fsub_rn(float a, float b) { return a - b; }
float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
std::uint32_t __float_as_uint(float x) { return std::bit_cast<std::uint32_t>(x); }
float __uint_as_float(std::uint32_t x) { return std::bit_cast<float>(x); }

}  // namespace

#define __device__
#include "any/block.cuh"
#undef __device__

#include "page/layout.h"
#include "scale/rules.h"

namespace bitdecoding {
namespace {

using cuda::FastBlock;

bool same_bits(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

template <int kN>
void expect_same_codes(const float* x, float scale) {
  std::uint8_t want[kN];
  std::uint32_t got[kN / 4];
  encode_block(x, kN, scale, want);
  FastBlock<kN>::encode(x, scale, got);
  for (int i = 0; i < kN; ++i) {
    ASSERT_EQ((got[i / 4] >> (8 * (i % 4))) & 0xFFU, want[i]) << x[i] << " under " << scale;
  }
}

// Under one scale.
template <int kN>
void expect_same(const float* x, float scale) {
  const float want = block_squared_error(x, kN, scale);
  const float got = FastBlock<kN>::squared_error(x, kN, scale);
  ASSERT_TRUE(same_bits(want, got)) << want << " " << got << " under " << scale;
  expect_same_codes<kN>(x, scale);
}

// What a writer makes of the block.
template <int kN, class Rule>
void expect_same_choice(Format format, const float* x, float outer) {
  const std::uint8_t want = Rule::choose(x, kN, outer);
  const std::uint8_t got = Rule::template choose<FastBlock<kN>>(x, kN, outer);
  ASSERT_EQ(want, got) << x[0] << " ... with the outer scale " << outer;
  const float unit = decode_scale(format, want);
  expect_same_codes<kN>(x, unit * outer);
  ASSERT_TRUE(same_bits(block_amax(x, kN), FastBlock<kN>::amax(x, kN)));
  ASSERT_EQ(block_saturates(format, x, kN, outer),
            !(FastBlock<kN>::largest(x) <= largest_block_value(format, outer)));
}

void expect_same_rules(const float* x, float outer) {
  expect_same_choice<16, Amax6>(Format::kNvfp4, x, outer);
  expect_same_choice<16, FourSix>(Format::kNvfp4, x, outer);
  expect_same_choice<16, CodeSearch>(Format::kNvfp4, x, outer);
  expect_same_choice<32, Mxfp4Search>(Format::kMxfp4, x, outer);
  expect_same_choice<32, Mxfp4Floor>(Format::kMxfp4, x, outer);
}

float ulps_away(float x, int n) {
  for (; n > 0; --n) x = std::nextafter(x, std::numeric_limits<float>::infinity());
  for (; n < 0; ++n) x = std::nextafter(x, 0.0F);
  return x;
}

// Decision points, codes and values that clip.
constexpr float kPoints[16] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F, 6.99F,
                               7.0F,  8.0F,  1e6F,  0.0F,  0.5F, 3.0F, 6.0F, 1.5F};

TEST(DeviceBlock, EveryScaleAroundEveryDecisionPoint) {
  for (int exponent = -60; exponent <= 60; exponent += 5) {
    for (int code = 1; code <= kE4m3MaxCode; ++code) {
      const float scale = std::ldexp(decode_e4m3(static_cast<std::uint8_t>(code)), exponent);
      for (int n = -2; n <= 2; ++n) {
        float x[32];
        for (int i = 0; i < 32; ++i) {
          x[i] = ulps_away(kPoints[i % 16] * scale, n) * (i % 3 == 0 ? -1.0F : 1.0F);
        }
        expect_same<16>(x, scale);
        // Without the values that clip.
        for (int i = 7; i < 11; ++i) x[i] = x[i + 16] = -0.0F;
        expect_same<16>(x, scale);
        expect_same<32>(x, std::ldexp(1.0F, exponent));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Scales whose inverse is no normal number: an E8M0 scale may be 2^-127 or 2^127.
TEST(DeviceBlock, ScalesAtTheEndsOfFloat) {
  for (const int exponent : {-140, -130, -129, -128, -127, -126, 125, 126, 127}) {
    const float scale = std::ldexp(1.0F, exponent);
    float x[32];
    for (int i = 0; i < 32; ++i) {
      x[i] = std::min(kPoints[i % 16] * scale, std::numeric_limits<float>::max());
    }
    expect_same<16>(x, scale);
    expect_same<32>(x, scale);
    for (float& v : x) v = v == 0.0F ? 0.0F : 0x1p-60F;  // far above the small ones
    expect_same<32>(x, scale);
    if (HasFatalFailure()) return;
  }
}

TEST(DeviceBlock, RulesChooseTheSameOnRandomBlocks) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  for (int n = 0; n < 20000; ++n) {
    const float outer = std::ldexp(1.0F, static_cast<int>(random() % 121) - 60);
    const float size = outer * std::ldexp(1.0F, static_cast<int>(random() % 28) - 14);
    float x[32];
    for (float& v : x) {
      v = normal(random) * size;
      // Few bits, as BF16 values have: quotients lie on decision points.
      if (n % 2 == 0) {
        v = std::bit_cast<float>(std::bit_cast<std::uint32_t>(v) & 0xFFFF0000U);
      }
    }
    expect_same_rules(x, outer);
    if (HasFatalFailure()) return;
  }
}

// What a rotation makes of values near float's largest: infinities, NaN, and blocks of NaN alone.
TEST(DeviceBlock, OverflowedBlocks) {
  std::mt19937 random(3);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float kinds[6] = {1.0F, -3e38F, inf, -inf, nan, 0.0F};
  for (int n = 0; n < 2000; ++n) {
    float x[32];
    for (float& v : x) v = n < 6 ? kinds[n] : kinds[random() % 6];
    for (const float outer : {1.0F, 0x1p60F, 0x1p-60F}) expect_same_rules(x, outer);
    if (HasFatalFailure()) return;
  }
}

TEST(DeviceBlock, WordsAreTheLayouts) {
  std::mt19937 random(5);
  for (int n = 0; n < 1000; ++n) {
    std::uint8_t bytes[4] = {};
    std::uint32_t halves[2] = {};
    for (int c = 0; c < 8; ++c) {
      const auto code = static_cast<std::uint8_t>(random() % 16);
      const layout::Nibble at = layout::fragment_code(FragmentOrder::kFp16Mma, 0, c);
      bytes[at.byte] = layout::put_code(bytes[at.byte], at, code);
      halves[c / 4] |= std::uint32_t{code} << (8 * (c % 4));
    }
    ASSERT_EQ(cuda::pack_codes(halves[0], halves[1]), std::bit_cast<std::uint32_t>(bytes));
  }
}

}  // namespace
}  // namespace bitdecoding
