// SPDX-License-Identifier: Apache-2.0
// Scale rules: error on Gaussian data, edges, and what every rule must keep.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "bitdecoding/quantize.h"
#include "scale/probability.h"
#include "scale/rules.h"

namespace bitdecoding {
namespace {

constexpr ScaleRule kRules[] = {ScaleRule::kAmax6, ScaleRule::kFourSix, ScaleRule::kCodeSearch,
                                ScaleRule::kMxfp4Search, ScaleRule::kMxfp4Floor};

int block_of(ScaleRule rule) { return is_e8m0_rule(rule) ? 32 : 16; }

struct Block {
  std::uint8_t scale = 0;
  std::vector<std::uint8_t> codes;
  std::vector<float> values;
};

Block quantize(ScaleRule rule, const std::vector<float>& x, float outer = 1.0F) {
  Block b;
  b.codes.assign(x.size(), 0xEE);
  auto scale = quantize_block(rule, x, outer, b.codes);
  EXPECT_TRUE(scale.ok()) << scale.status().message();
  if (!scale.ok()) return b;
  b.scale = scale.value();
  const Format format = is_e8m0_rule(rule) ? Format::kMxfp4 : Format::kNvfp4;
  for (const std::uint8_t c : b.codes) {
    EXPECT_LT(c, 16);
    b.values.push_back(dequantize_value(format, c, b.scale, outer));
  }
  return b;
}

// Relative MSE on N(0, 1) times the outer scale. (It depends a little on where the scale falls
// between two powers of two: mxfp4_floor averages .0134 over a binade of sigma.)
double gaussian_mse(ScaleRule rule, float outer) {
  std::mt19937_64 engine(20240607);
  std::normal_distribution<float> normal;
  constexpr int kBlocks = 80000;
  double error = 0;
  double norm = 0;
  std::vector<float> x(static_cast<std::size_t>(block_of(rule)));
  for (int i = 0; i < kBlocks; ++i) {
    for (float& v : x) v = normal(engine) * outer;
    const Block b = quantize(rule, x, outer);
    for (std::size_t j = 0; j < x.size(); ++j) {
      const double d = (x[j] - b.values[j]) / outer;
      error += d * d;
      norm += (x[j] / outer) * (x[j] / outer);
    }
  }
  return error / norm;
}

TEST(ScaleRules, GaussianErrorIsAsStated) {
  // The relative standard error of 80,000 blocks is below 0.2 %.
  const double expected[] = {.00903, .00755, .00670, .01244, .01321};
  for (int i = 0; i < 5; ++i) {
    const double mse = gaussian_mse(kRules[i], 1.0F);
    EXPECT_TRUE(std::fabs(mse / expected[i] - 1) <= 0.01) << "rule " << i << ": " << mse;
  }
  // An outer scale of a power of two changes nothing.
  EXPECT_EQ(gaussian_mse(ScaleRule::kFourSix, 1.0F), gaussian_mse(ScaleRule::kFourSix, 0x1p-12F));
}

TEST(ScaleRules, ZeroBlockAmongSmallOnes) {
  std::mt19937_64 engine(1);
  std::normal_distribution<float> normal(0.0F, 0.01F);
  for (const ScaleRule rule : kRules) {
    for (const float outer : {0x1p-18F, 0x1p-20F, 1.0F}) {  // near 0.01 / 2688, 1e-6 and none
      for (int block = 0; block < 64; ++block) {
        std::vector<float> x(static_cast<std::size_t>(block_of(rule)));
        for (float& v : x) v = block == 17 ? 0.0F : normal(engine);
        const Block b = quantize(rule, x, outer);
        EXPECT_LE(b.scale, is_e8m0_rule(rule) ? kE8m0MaxCode : kE4m3MaxCode);
        for (const float v : b.values) {
          EXPECT_TRUE(std::isfinite(v));
          if (block == 17) {
            EXPECT_EQ(v, 0.0F);
          }
        }
      }
    }
  }
}

TEST(ScaleRules, AZeroScaleHasZeroCodes) {
  for (const ScaleRule rule : {ScaleRule::kAmax6, ScaleRule::kFourSix, ScaleRule::kCodeSearch}) {
    std::vector<float> x(16, -0.0F);
    const Block zero = quantize(rule, x);
    EXPECT_EQ(zero.scale, 0);
    for (const std::uint8_t c : zero.codes) EXPECT_EQ(c, 0);
    x[3] = -1e-12F;
    const Block flushed = quantize(rule, x);
    EXPECT_EQ(flushed.scale, 0);
    for (const std::uint8_t c : flushed.codes) EXPECT_EQ(c, 0);
  }
}

TEST(ScaleRules, SmallestAndLargestMagnitudes) {
  const float magnitudes[] = {
      std::numeric_limits<float>::denorm_min(), 1e-38F, 0x1p-126F, 1e-20F, 1.0F, 1e20F,
      std::numeric_limits<float>::max()};
  for (const ScaleRule rule : kRules) {
    for (const float m : magnitudes) {
      std::vector<float> x(static_cast<std::size_t>(block_of(rule)), m);
      x[1] = -m;
      const Block b = quantize(rule, x);
      EXPECT_LE(b.scale, is_e8m0_rule(rule) ? kE8m0MaxCode : kE4m3MaxCode);
      for (const float v : b.values) EXPECT_TRUE(std::isfinite(v));
      EXPECT_LE(b.values[0], m * 1.5F);
      // Beyond the range is the largest value, also where squared errors overflow.
      if (m >= 1e20F && !is_e8m0_rule(rule)) {
        EXPECT_EQ(b.values[0], 2688.0F) << static_cast<int>(rule);
      }
    }
    // Inside the range of the largest outer scale they overflow, too.
    std::vector<float> x(static_cast<std::size_t>(block_of(rule)), 0x1p70F);
    x[1] = -0x1p71F;
    const Block b = quantize(rule, x, 0x1p64F);
    EXPECT_TRUE(std::fabs(b.values[0] - x[0]) <= 0.13F * x[0]) << static_cast<int>(rule);
    EXPECT_TRUE(std::fabs(b.values[1] - x[1]) <= -0.13F * x[1]) << static_cast<int>(rule);
  }
  // What the largest scale can express: 6 * 448.
  std::vector<float> x(16, 2688.0F);
  EXPECT_EQ(quantize(ScaleRule::kAmax6, x).values[0], 2688.0F);
  x[0] = 1e6F;
  EXPECT_EQ(quantize(ScaleRule::kAmax6, x).values[0], 2688.0F);
}

TEST(ScaleRules, DocumentedBlock) {
  // The block of docs/format.md.
  const std::vector<float> x = {6.0F,  5.0F, -3.4F, 2.5F, 1.75F, 1.25F, 0.75F, 0.25F,
                                -0.2F, 0.0F, 0.0F,  0.0F, 0.0F,  0.0F,  0.0F,  0.0F};
  const Block b = quantize(ScaleRule::kAmax6, x);
  EXPECT_EQ(b.scale, 0x38);
  const std::vector<std::uint8_t> codes = {7, 6, 13, 4, 4, 2, 2, 0, 8, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(b.codes, codes);
}

TEST(ScaleRules, FourSixBorders) {
  // The rule reads the float maximum, never one that was rounded up on the way.
  for (const float amax : {4.0F * (1 - 0x1p-10F), 4.0F * (1 - 0x1p-9F), 4.0F}) {
    std::vector<float> x(16, 0.0F);
    x[0] = amax;
    const Block b = quantize(ScaleRule::kFourSix, x);
    // amax / 4 rounds to the scale 1 (tie or not), amax / 6 to 0.6875: only 4 * 1 is near.
    EXPECT_EQ(b.scale, 0x38);
    EXPECT_EQ(b.values[0], 4.0F);
  }
}

TEST(ScaleRules, RoundingOfTheScaleIsNearestEven) {
  const float scales[] = {1.06F, 1.0625F, 1.07F};
  const float rounded[] = {1.0F, 1.0F, 1.125F};
  for (int i = 0; i < 3; ++i) {
    std::vector<float> x(16, 0.0F);
    x[0] = 6.0F * scales[i];
    const Block b = quantize(ScaleRule::kAmax6, x);
    EXPECT_EQ(decode_e4m3(b.scale), rounded[i]);
    EXPECT_EQ(b.values[0], 6.0F * rounded[i]);
    EXPECT_TRUE(std::fabs(b.values[0] - x[0]) <= x[0] / 16);
  }
}

TEST(ScaleRules, CodesUseATrueDivision) {
  // x / s is 1.7499999 in a true division and 1.75 through a rounded reciprocal: codes 3 and 4.
  const float s = decode_e4m3(0x07);
  EXPECT_EQ(s, 0.013671875F);
  const float x = 0.02392577938735485F;
  EXPECT_EQ(encode_e2m1(x / s), 3);
  // Every midpoint times every scale, five neighbours: monotone, and the tie goes to even.
  const float ties[7] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  const int even[7] = {0, 2, 2, 4, 4, 6, 6};
  for (int code = 1; code <= kE4m3MaxCode; ++code) {
    const float scale = decode_e4m3(static_cast<std::uint8_t>(code));
    for (int i = 0; i < 7; ++i) {
      const float tie = ties[i] * scale;  // exact: 3 + 4 significant bits
      EXPECT_EQ(encode_e2m1(tie / scale), even[i]);
      float below = tie;
      float above = tie;
      for (int step = 0; step < 2; ++step) {
        below = std::nextafter(below, 0.0F);
        above = std::nextafter(above, 1e9F);
        // The quotient may round onto the tie itself; it never passes it.
        EXPECT_LE(encode_e2m1(below / scale), std::max(i, even[i]));
        EXPECT_GE(encode_e2m1(above / scale), std::min(i + 1, even[i]));
      }
    }
  }
}

TEST(ScaleRules, QuantizedDataIsAFixedPoint) {
  std::mt19937_64 engine(3);
  std::normal_distribution<float> normal;
  for (const ScaleRule rule : {ScaleRule::kAmax6, ScaleRule::kMxfp4Floor, ScaleRule::kCodeSearch,
                               ScaleRule::kFourSix, ScaleRule::kMxfp4Search}) {
    for (int i = 0; i < 3000; ++i) {
      std::vector<float> x(static_cast<std::size_t>(block_of(rule)));
      for (float& v : x) v = normal(engine);
      const Block once = quantize(rule, x);
      const Block twice = quantize(rule, once.values);
      for (std::size_t j = 0; j < x.size(); ++j) EXPECT_EQ(once.values[j], twice.values[j]);
      if (HasFailure()) return;
    }
  }
}

// Every scale code that is no subnormal, every code, of every block that a rule can have made: a
// maximum of 6 under amax6, of 6 or 4 under four_six. Below 2^-6 a scale has fewer bits than three,
// and what it rounds away the next time is not what it rounded away the first: outer scales are for
// that.
TEST(ScaleRules, QuantizedBlocksOfEveryScaleAreFixedPoints) {
  for (const ScaleRule rule : {ScaleRule::kAmax6, ScaleRule::kFourSix, ScaleRule::kCodeSearch,
                               ScaleRule::kMxfp4Floor, ScaleRule::kMxfp4Search}) {
    const bool mx = is_e8m0_rule(rule);
    const int n = block_of(rule);
    for (int scale_code = mx ? 2 : 8; scale_code <= (mx ? 252 : 0x7E); ++scale_code) {
      const float scale =
          decode_scale(mx ? Format::kMxfp4 : Format::kNvfp4, static_cast<std::uint8_t>(scale_code));
      for (const int top : {7, 6}) {
        if (top == 6 && (rule == ScaleRule::kAmax6 || rule == ScaleRule::kCodeSearch)) continue;
        std::vector<float> x;
        for (int i = 0; i < n; ++i) {
          const int code = (i * 5 % 8 > top ? top : i * 5 % 8) + 8 * (i / 8 % 2);
          x.push_back(decode_e2m1(static_cast<std::uint8_t>(code)) * scale);
        }
        const Block b = quantize(rule, x);
        for (std::size_t i = 0; i < x.size(); ++i) {
          ASSERT_EQ(b.values[i], x[i])
              << "rule " << static_cast<int>(rule) << " scale " << scale_code << " top " << top;
        }
      }
    }
  }
}

TEST(ScaleRules, SearchNeverLosesToItsStart) {
  std::mt19937_64 engine(4);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 3000; ++i) {
    std::vector<float> x(16);
    for (float& v : x) v = normal(engine);
    auto error = [&](ScaleRule rule) {
      return block_squared_error(x.data(), 16, decode_e4m3(choose_scale(rule, x.data(), 16, 1.0F)));
    };
    EXPECT_LE(error(ScaleRule::kFourSix), error(ScaleRule::kAmax6));
    EXPECT_LE(error(ScaleRule::kCodeSearch), error(ScaleRule::kAmax6));
  }
}

TEST(ScaleRules, SmallHeadNeedsItsOuterScale) {
  std::mt19937_64 engine(5);
  std::normal_distribution<float> normal(0.0F, 1e-4F);
  double norm = 0;
  double error[2] = {0, 0};
  for (int i = 0; i < 4000; ++i) {
    std::vector<float> x(16);
    for (float& v : x) v = normal(engine);
    for (int k = 0; k < 2; ++k) {
      const Block b = quantize(ScaleRule::kAmax6, x, k == 0 ? 1.0F : 0x1p-22F);
      for (int j = 0; j < 16; ++j) {
        const double d = x[static_cast<std::size_t>(j)] - b.values[static_cast<std::size_t>(j)];
        error[k] += d * d;
      }
    }
    for (const float v : x) norm += v * v;
  }
  EXPECT_GE(std::sqrt(error[0] / norm), 0.9);  // flattened: amax / 6 is under half a step of E4M3
  EXPECT_LE(std::sqrt(error[1] / norm), 0.11);
}

TEST(ScaleRules, BadArgumentsAreSentences) {
  std::vector<float> x(16, 1.0F);
  std::vector<std::uint8_t> codes(16);
  EXPECT_EQ(quantize_block(static_cast<ScaleRule>(9), x, 1.0F, codes).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_FALSE(quantize_block(ScaleRule::kMxfp4Search, x, 1.0F, codes).ok());
  EXPECT_FALSE(quantize_block(ScaleRule::kAmax6, x, 3.0F, codes).ok());
  EXPECT_FALSE(quantize_block(ScaleRule::kAmax6, x, 0.0F, codes).ok());
  EXPECT_FALSE(quantize_block(ScaleRule::kAmax6, x, -1.0F, codes).ok());
  EXPECT_FALSE(quantize_block(ScaleRule::kAmax6, x, std::nanf(""), codes).ok());
  EXPECT_FALSE(quantize_block(ScaleRule::kAmax6, x, 1.0F, std::span(codes).first(8)).ok());
  x[5] = std::nanf("");
  const auto nan = quantize_block(ScaleRule::kAmax6, x, 1.0F, codes);
  EXPECT_NE(nan.status().message().find("value 5"), std::string::npos);
}

TEST(ProbabilityRule, FollowsTauAndLiftsSmallBlocks) {
  float block[16] = {};
  block[4] = 3 * 0x1p-10F;
  EXPECT_EQ((ProbabilityRule{1.0F, 0.0F}.choose(block, 16)), 0);  // max / 6 is the tie with zero
  EXPECT_EQ((ProbabilityRule{1.0F, 0.0205078125F}.choose(block, 16)), 1);
  block[4] = 21.0F / 1024.0F;  // in code units k = 10.5: rounds to 10, at most tau
  EXPECT_EQ((ProbabilityRule{1.0F, 21.0F / 1024.0F}.choose(block, 16)),
            encode_e4m3(block[4] / 2.0F));
  block[4] = 22.0F / 1024.0F;
  EXPECT_EQ((ProbabilityRule{1.0F, 21.0F / 1024.0F}.choose(block, 16)),
            encode_e4m3(block[4] / 6.0F));
}

}  // namespace
}  // namespace bitdecoding
