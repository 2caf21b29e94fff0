// SPDX-License-Identifier: Apache-2.0
// What calibration buys, in the attention's output, measured on made-up rows whose answer is known.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <random>

#include "attend_compare.h"
#include "bitdecoding/calibrate.h"
#include "numeric/bf16.h"
#include "world.h"

namespace bitdecoding {
namespace {

using test::World;
using test::WorldOptions;

constexpr int kDim = 128;
constexpr int kTokens = 2048;

std::vector<float> outlier_keys(int rows, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> keys(static_cast<std::size_t>(rows) * kDim);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t d = i % kDim;
    keys[i] = normal(engine) + (d == 5 || d == 69 ? 100.0F : 0.0F);
  }
  return keys;
}

// The newest row's output over `keys`, in double.
std::vector<float> exact_output(const World& w, const std::vector<float>& keys,
                                const std::vector<float>& values) {
  std::vector<float> out;
  const std::int64_t n = kTokens + 1;
  for (int head = 0; head < w.options.num_q_heads; ++head) {
    std::vector<double> score(static_cast<std::size_t>(n));
    double top = -INFINITY;
    for (std::int64_t p = 0; p < n; ++p) {
      double dot = 0;
      for (int d = 0; d < kDim; ++d) {
        dot +=
            double{w.query_of(9, kTokens, head, d)} * keys[static_cast<std::size_t>(p * kDim + d)];
      }
      score[static_cast<std::size_t>(p)] = dot * w.params.sm_scale;
      top = std::max(top, score[static_cast<std::size_t>(p)]);
    }
    double sum = 0;
    for (double& s : score) sum += s = std::exp(s - top);
    for (int d = 0; d < kDim; ++d) {
      double x = 0;
      for (std::int64_t p = 0; p < n; ++p) {
        x += score[static_cast<std::size_t>(p)] * values[static_cast<std::size_t>(p * kDim + d)];
      }
      out.push_back(static_cast<float>(x / sum));
    }
  }
  return out;
}

// The same from FP4 pages of the whole recipe but for sink and tail, with these means.
std::vector<float> paged_output(World* w, const std::vector<float>& keys,
                                const std::vector<float>& values, const float* shift) {
  w->layer.key_shift = shift;
  std::vector<std::int32_t> pages;
  for (int p = 1; p <= kTokens / 64 + 1; ++p) pages.push_back(p);
  const int sequence = w->add_sequence(pages);
  const auto rows = [](const std::vector<float>& all, std::ptrdiff_t begin, std::ptrdiff_t end) {
    return std::vector<float>(all.begin() + begin * kDim, all.begin() + end * kDim);
  };
  EXPECT_TRUE(w->plan_step({{sequence, test::iota_tokens(0, kTokens)}}).ok());
  EXPECT_TRUE(w->write_rows(rows(keys, 0, kTokens), rows(values, 0, kTokens)).ok());
  EXPECT_TRUE(w->plan_step({{sequence, {9}}}).ok());
  EXPECT_TRUE(
      w->write_rows(rows(keys, kTokens, kTokens + 1), rows(values, kTokens, kTokens + 1)).ok());
  const test::StepResult result = w->attend();
  EXPECT_TRUE(result.status.ok()) << result.status.message();
  return result.output;
}

std::vector<float> calibrated_means(const std::vector<float>& keys, int rows) {
  auto means = KeyMeanAccumulator::make(1, 1, kDim).take();
  EXPECT_TRUE(means->add(0, 0, 1, {keys.data(), DType::kF32, kDim, kDim}, rows, nullptr).ok());
  return means->means({0}, 0, 1).take();
}

// +100 on two of 128 channels: the error of the scores with and without key means, and of the
// output. The means come from other rows than those that are attended to.
TEST(CalibrationQuality, ConstantOutliersDisappear) {
  WorldOptions options;
  options.head_dim = kDim;
  options.num_kv_heads = 1;
  options.num_q_heads = 4;
  options.sink_tokens = 0;
  options.tail_tokens = 0;
  options.value_shift = false;
  options.num_pages = 40;
  const std::vector<float> keys = outlier_keys(kTokens + 1, 1);
  std::mt19937 engine(2);
  std::normal_distribution<float> normal;
  // Values on a grid that FP4 holds exactly, so that the error is that of the keys.
  std::vector<float> values(keys.size());
  for (float& v : values) v = normal(engine) > 0 ? 1.0F : -1.0F;
  const std::vector<float> means = calibrated_means(outlier_keys(4096, 3), 4096);
  std::vector<float> bf16 = keys;
  for (float& k : bf16) k = round_to_bf16(k);
  World with(options);
  World without(options);
  const std::vector<float> exact = exact_output(with, keys, values);
  const std::vector<float> rounded = exact_output(with, bf16, values);
  const std::vector<float> shifted = paged_output(&with, keys, values, means.data());
  const std::vector<float> plain = paged_output(&without, keys, values, nullptr);
  const double bf16_error = test::relative_error(rounded, exact, 0, exact.size());
  const double shifted_error = test::relative_error(shifted, exact, 0, exact.size());
  const double plain_error = test::relative_error(plain, exact, 0, exact.size());
  options.key_rule = ScaleRule::kCodeSearch;
  World search(options);
  const double search_error = test::relative_error(
      paged_output(&search, keys, values, means.data()), exact, 0, exact.size());
  std::printf(
      "output error: BF16 keys %.4f, with means %.4f (code_search %.4f), without %.4f: %.1f (%.1f) "
      "times less, %.0f times in squares\n",
      bf16_error, shifted_error, search_error, plain_error, plain_error / shifted_error,
      plain_error / search_error, std::pow(plain_error / shifted_error, 2));
  // Without means half of the rotated channels hold the constant and no more; what is left then is
  // the error of FP4 on N(0, 1) keys.
  EXPECT_TRUE(plain_error >= 15 * shifted_error);
}

// A sink with half the mass before 32K tokens with normal scores. The sink is in BF16 and has its
// own maximum, so that probabilities in pages are relative to the largest of them.
struct Peaky {
  std::vector<float> own;     // weights of the pages against their own maximum
  std::vector<float> common;  // against the sink's
};

Peaky peaky_row(double spread, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(0.0, spread);
  std::vector<double> weight(32768);
  double sum = 0;
  double top = 0;
  for (double& w : weight) {
    sum += w = std::exp(normal(engine));
    top = std::max(top, w);
  }
  Peaky row;
  for (const double w : weight) {
    row.own.push_back(static_cast<float>(w / top));
    row.common.push_back(static_cast<float>(w / sum));  // the sink weighs as much as all of them
  }
  return row;
}

TEST(CalibrationQuality, PeakyRowsKeepTheirMass) {
  for (const double spread : {0.5, 1.0, 2.0, 3.0}) {
    const Peaky row = peaky_row(spread, 5);
    const auto n = static_cast<std::int64_t>(row.own.size());
    TauCalibrator eight(8.0F);
    TauCalibrator one(1.0F);
    TauCalibrator common(1.0F);
    TauCalibrator common_eight(8.0F);
    eight.add_row(row.own.data(), n);
    one.add_row(row.own.data(), n);
    common.add_row(row.common.data(), n);
    common_eight.add_row(row.common.data(), n);
    // Of the whole mass, half of which is the sink's.
    const TauChoice best = eight.choose();
    std::printf(
        "spread %.1f: lost mass %.4f %% with tau %.4f and c 8; amax6 %.4f %% (c 8), %.4f %% (c 1); "
        "one maximum for sink and pages: %.2f %% with tau and c 8, %.2f %% with amax6 and c 1\n",
        spread, 50 * best.lost, static_cast<double>(best.tau), 50 * best.lost_amax6,
        50 * one.choose().lost_amax6, 50 * common_eight.choose().lost,
        50 * common.choose().lost_amax6);
    // At a spread of 3 a handful of 32,768 tokens hold half of the pages' mass, and tau minimises
    // squared error, not loss.
    EXPECT_TRUE(0.5 * best.lost <= (spread < 3.0 ? 0.001 : 0.005)) << spread;
  }
}

}  // namespace
}  // namespace bitdecoding
