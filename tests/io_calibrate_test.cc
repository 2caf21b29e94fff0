// SPDX-License-Identifier: Apache-2.0
// Key means and tau: against directly computed values, in any order of batches, with bad input.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "bitdecoding/calibrate.h"
#include "numeric/bf16.h"
#include "scale/probability.h"

namespace bitdecoding {
namespace {

constexpr int kDim = 64;

std::vector<float> random_keys(int rows, int heads, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.5F, 2.0F);
  std::vector<float> keys(static_cast<std::size_t>(rows * heads * kDim));
  for (float& k : keys) k = normal(engine);
  return keys;
}

TensorView view(const std::vector<float>& keys, int heads) {
  return {keys.data(), DType::kF32, heads * kDim, kDim};
}

TEST(KeyMeans, EqualTheMeanOfTheRoundedKeys) {
  const int rows = 200;
  const std::vector<float> keys = random_keys(rows, 3, 1);
  auto means = KeyMeanAccumulator::make(2, 3, kDim).take();
  ASSERT_TRUE(means->add(1, 0, 3, view(keys, 3), rows, nullptr).ok());
  const std::vector<float> got = means->means({1}, 0, 3).take();
  for (int i = 0; i < 3 * kDim; ++i) {
    double sum = 0;
    for (int r = 0; r < rows; ++r)
      sum += round_to_bf16(keys[static_cast<std::size_t>(r * 3 * kDim + i)]);
    // The sum is exact, so one rounding to float remains.
    EXPECT_EQ(got[static_cast<std::size_t>(3 * kDim + i)], static_cast<float>(sum / rows));
    EXPECT_EQ(got[static_cast<std::size_t>(i)], 0.0F);
  }
}

TEST(KeyMeans, DoNotDependOnTheOrderOfBatches) {
  std::vector<std::vector<float>> batches;
  for (unsigned b = 0; b < 5; ++b) batches.push_back(random_keys(40, 1, b));
  batches[4][7] = 3e4F;
  auto forward = KeyMeanAccumulator::make(1, 1, kDim).take();
  auto backward = KeyMeanAccumulator::make(1, 1, kDim).take();
  for (int b = 0; b < 5; ++b) {
    ASSERT_TRUE(
        forward->add(0, 0, 1, view(batches[static_cast<std::size_t>(b)], 1), 40, nullptr).ok());
    ASSERT_TRUE(
        backward->add(0, 0, 1, view(batches[static_cast<std::size_t>(4 - b)], 1), 40, nullptr)
            .ok());
  }
  EXPECT_EQ(forward->means({0}, 0, 1).take(), backward->means({0}, 0, 1).take());
}

TEST(KeyMeans, PaddingAndNonFiniteRowsAreLeftOut) {
  std::vector<float> keys = random_keys(200, 2, 3);
  std::vector<std::int64_t> slots(200, 5);
  for (int r = 150; r < 200; ++r) {
    slots[static_cast<std::size_t>(r)] = -1;
    std::fill_n(keys.begin() + r * 2 * kDim, 2 * kDim, 1e9F);
  }
  keys[10] = std::numeric_limits<float>::quiet_NaN();        // row 0, head 0
  keys[kDim + 3] = std::numeric_limits<float>::infinity();   // row 0, head 1
  keys[3 * kDim] = -std::numeric_limits<float>::infinity();  // row 1, head 1
  auto means = KeyMeanAccumulator::make(1, 2, kDim).take();
  ASSERT_TRUE(means->add(0, 0, 2, view(keys, 2), 200, slots.data()).ok());
  EXPECT_EQ(means->tokens(0, 0, 1), 149U);
  EXPECT_EQ(means->tokens(0, 0, 2), 148U);
  EXPECT_EQ(means->skipped_rows(), 3U);
  for (const float m : means->means({0}, 0, 2).take()) EXPECT_LT(std::abs(m), 5.0F);
}

TEST(KeyMeans, ReadsStridesAndHalfTypes) {
  const std::vector<float> keys = random_keys(150, 1, 4);
  std::vector<std::uint16_t> wide(150 * 300, 0x7FC0);  // NaN between the rows
  for (int r = 0; r < 150; ++r) {
    for (int d = 0; d < kDim; ++d) {
      wide[static_cast<std::size_t>(r * 300 + d)] =
          encode_bf16(keys[static_cast<std::size_t>(r * kDim + d)]);
    }
  }
  auto a = KeyMeanAccumulator::make(1, 1, kDim).take();
  auto b = KeyMeanAccumulator::make(1, 1, kDim).take();
  ASSERT_TRUE(a->add(0, 0, 1, view(keys, 1), 150, nullptr).ok());
  ASSERT_TRUE(b->add(0, 0, 1, {wide.data(), DType::kBf16, 300, kDim}, 150, nullptr).ok());
  EXPECT_EQ(a->means({0}, 0, 1).take(), b->means({0}, 0, 1).take());
}

TEST(KeyMeans, TooFewTokensNameTheLayer) {
  const std::vector<float> keys = random_keys(128, 1, 5);
  auto means = KeyMeanAccumulator::make(4, 1, kDim).take();
  ASSERT_TRUE(means->add(1, 0, 1, view(keys, 1), 128, nullptr).ok());
  ASSERT_TRUE(means->add(3, 0, 1, view(keys, 1), 8, nullptr).ok());
  EXPECT_TRUE(means->means({1}, 0, 1).ok());
  const Status status = means->means({1, 3}, 0, 1).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("layer 3, KV head 0 has seen 8 tokens"), std::string::npos)
      << status.message();
}

TEST(KeyMeans, BadRanges) {
  const std::vector<float> keys = random_keys(2, 2, 6);
  auto means = KeyMeanAccumulator::make(2, 2, kDim).take();
  EXPECT_EQ(means->add(2, 0, 2, view(keys, 2), 2, nullptr).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(means->add(-1, 0, 2, view(keys, 2), 2, nullptr).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(means->add(0, 1, 2, view(keys, 2), 2, nullptr).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(means->add(0, 0, 2, {}, 2, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(KeyMeanAccumulator::make(0, 1, kDim).ok());
  EXPECT_FALSE(KeyMeanAccumulator::make(1, 1, 1 << 30).ok());
  EXPECT_EQ(means->means({0}, 1, 2).status().code(), StatusCode::kOutOfRange);
}

// A constant of 100 on two channels of N(0, 1) keys: the report names exactly these.
TEST(KeyMeans, OutlierChannelsAreReported) {
  std::mt19937 engine(7);
  std::normal_distribution<float> normal;
  std::vector<float> keys(512 * 2 * 128);
  for (float& k : keys) k = normal(engine);
  for (int r = 0; r < 512; ++r) {
    keys[static_cast<std::size_t>((r * 2 + 1) * 128 + 5)] += 100.0F;
    keys[static_cast<std::size_t>((r * 2 + 1) * 128 + 69)] -= 120.0F;
  }
  auto means = KeyMeanAccumulator::make(3, 2, 128).take();
  ASSERT_TRUE(means->add(2, 0, 2, {keys.data(), DType::kF32, 256, 128}, 512, nullptr).ok());
  const std::vector<KeyOutlier> found = means->outliers();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].dim, 69);
  EXPECT_EQ(found[1].dim, 5);
  for (const KeyOutlier& outlier : found) {
    EXPECT_EQ(outlier.layer, 2);
    EXPECT_EQ(outlier.kv_head, 1);
    EXPECT_LT(std::abs(std::abs(outlier.mean) - 110.0), 11.0);
    EXPECT_LT(outlier.deviation, 2.0);
  }
}

// ---- tau ---------------------------------------------------------------------------------------

// The error of all rows under a rule, block by block: what the calibrator must have summed.
double rule_error(const std::vector<std::vector<float>>& rows, const ProbabilityRule& rule) {
  double total = 0;
  for (const std::vector<float>& row : rows) {
    for (std::size_t begin = 0; begin < row.size(); begin += 16) {
      float x[16] = {};
      for (std::size_t i = begin; i < std::min(row.size(), begin + 16); ++i) {
        x[i - begin] = rule.c * row[i];
      }
      const float scale = decode_e4m3(rule.choose(x, 16));
      for (const float v : x) {
        const double q = scale == 0.0F ? 0.0 : decode_e2m1(encode_e2m1(v / scale)) * scale;
        total += (v - q) * (v - q) / (static_cast<double>(rule.c) * rule.c);
      }
    }
  }
  return total;
}

std::vector<std::vector<float>> softmax_rows(double temperature, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(0.0, temperature);
  std::vector<std::vector<float>> rows;
  for (int r = 0; r < 20; ++r) {
    std::vector<double> e(500 + static_cast<std::size_t>(r));
    double sum = 0;
    for (double& x : e) sum += x = std::exp(normal(engine));
    std::vector<float> row;
    for (const double x : e) row.push_back(static_cast<float>(x / sum));
    rows.push_back(row);
  }
  return rows;
}

TEST(TauCalibration, ChoosesTheSmallestErrorOfTheGrid) {
  for (const float c : {1.0F, 8.0F}) {
    for (const double temperature : {0.5, 2.0, 4.0}) {
      const auto rows = softmax_rows(temperature, 11);
      TauCalibrator calibrator(c);
      for (const auto& row : rows)
        calibrator.add_row(row.data(), static_cast<std::int64_t>(row.size()));
      const TauChoice choice = calibrator.choose();
      const double amax6 = rule_error(rows, {c, 0.0F});
      // Sums of the same float errors in another order: a few thousand double roundings.
      const double tolerance = 1e-5 * amax6;
      EXPECT_TRUE(std::abs(choice.error_amax6 - amax6) <= tolerance);
      EXPECT_TRUE(std::abs(choice.error - rule_error(rows, {c, choice.tau})) <= tolerance);
      for (int k = 0; k <= TauCalibrator::kMaxCode; ++k) {
        const float tau = decode_e4m3(static_cast<std::uint8_t>(k));
        EXPECT_TRUE(choice.error <= rule_error(rows, {c, tau}) + tolerance) << c << " " << k;
      }
    }
  }
}

// Blocks whose maximum is 2/512 fall to scale 0 under max/6 and keep half their mass under max/2.
TEST(TauCalibration, RescuesBlocksThatUnderflow) {
  std::vector<float> row(1600, 2.0F / 512.0F);
  TauCalibrator calibrator(1.0F);
  calibrator.add_row(row.data(), 1600);
  const TauChoice choice = calibrator.choose();
  EXPECT_EQ(choice.blocks, 100U);
  EXPECT_EQ(choice.affected, 100U);
  EXPECT_EQ(choice.tau, 2.5F / 512.0F);
  EXPECT_EQ(choice.error, 0.0);
  EXPECT_GT(choice.error_amax6, 0.0);
}

TEST(TauCalibration, WithoutEvidenceTheRuleStaysOff) {
  TauCalibrator calibrator(8.0F);
  EXPECT_EQ(calibrator.choose().tau, 0.0F);
  const std::vector<float> large(64, 0.75F);  // both scales are exact
  calibrator.add_row(large.data(), 64);
  EXPECT_EQ(calibrator.choose().tau, 0.0F);
  const std::vector<float> bad(16, std::numeric_limits<float>::quiet_NaN());
  calibrator.add_row(bad.data(), 16);
  EXPECT_EQ(calibrator.choose().tau, 0.0F);
  EXPECT_EQ(calibrator.choose().blocks, 5U);
}

}  // namespace
}  // namespace bitdecoding
