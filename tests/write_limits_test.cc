// SPDX-License-Identifier: Apache-2.0
// Quantize at the ends of the number formats: what does not fit is counted, never stored as
// infinity or NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "page/address.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

const std::vector<std::int32_t> kPages = {7, 3, 11, 1, 20, 9, 8, 2};

TEST(WriteLimits, SaturationAndUnderflowAreCounted) {
  WorldOptions o;
  o.num_kv_heads = o.num_q_heads = 1;
  o.hadamard = false;
  o.shift = false;
  World w(o);
  const int s = w.add_sequence(kPages);
  ASSERT_TRUE(w.plan_step({{s, iota_tokens(0, 1)}}).ok());
  std::vector<float> k(static_cast<std::size_t>(o.head_dim), 1.0F);
  std::vector<float> v = k;
  k[0] = 2688.0F;                                                        // just fits
  k[16] = 2704.0F;                                                       // does not
  for (int i = 32; i < 48; ++i) k[static_cast<std::size_t>(i)] = 1e-4F;  // scale rounds to zero
  v[3] = 1e30F;
  ASSERT_TRUE(w.write_rows(k, v).ok());
  EXPECT_EQ(w.counters.saturated_blocks, 2U);
  EXPECT_EQ(w.counters.flushed_blocks, 1U);
}

// Finite keys of which the rotation makes infinity and NaN: stored as numbers, and counted.
TEST(WriteLimits, KeysThatTheRotationOverflowsAreCounted) {
  for (const std::string& backend : backend_names()) {
    for (const Format f : {Format::kNvfp4, Format::kMxfp4}) {
      SCOPED_TRACE(testing::Message() << backend << " " << format_name(f));
      WorldOptions o;
      o.backend = backend;
      o.format = f;
      o.num_kv_heads = o.num_q_heads = 1;
      World w(o);
      const int s = w.add_sequence(kPages);
      ASSERT_TRUE(w.plan_step({{s, iota_tokens(0, 1)}}).ok());
      std::vector<float> k;
      for (int d = 0; d < o.head_dim; ++d) k.push_back(d % 3 == 0 ? -3e38F : 3e38F);
      const std::vector<float> v(k.size(), 1.0F);
      ASSERT_TRUE(w.write_rows(k, v).ok());
      EXPECT_EQ(w.counters.non_finite, 0U);
      EXPECT_EQ(w.counters.saturated_blocks, static_cast<std::uint64_t>(64 / scale_block(f)));
      std::uint64_t corrupt = 0;
      for (int d = 0; d < o.head_dim; ++d) {
        EXPECT_TRUE(std::isfinite(read_element(w.layer.geometry, w.head_bytes(kPages[0], 0),
                                               Side::kKey, 0, d, 1.0F, &corrupt)));
      }
      EXPECT_EQ(corrupt, 0U);
    }
  }
}

// MXFP4 has a largest value, too, where an outer scale is small.
TEST(WriteLimits, SaturationOfMxfp4IsCounted) {
  for (const std::string& backend : backend_names()) {
    WorldOptions o;
    o.backend = backend;
    o.format = Format::kMxfp4;
    o.num_kv_heads = o.num_q_heads = 1;
    o.hadamard = false;
    o.shift = false;
    o.outer_exponent = -60;  // 6 * 2^67 is the most
    World w(o);
    const int s = w.add_sequence(kPages);
    ASSERT_TRUE(w.plan_step({{s, iota_tokens(0, 1)}}).ok());
    std::vector<float> k(static_cast<std::size_t>(o.head_dim), 0x1.8p69F);
    std::vector<float> v(k.size(), 1.0F);
    k[40] = 0x1.9p69F;
    v[3] = -0x1p80F;
    ASSERT_TRUE(w.write_rows(k, v).ok());
    EXPECT_EQ(w.counters.saturated_blocks, 2U) << backend;
    EXPECT_EQ(w.counters.flushed_blocks, 0U) << backend;
  }
}

// 64 keys of N(0, 1) with a constant of 100 on channels 5 and 69, as models have them.
struct OutlierKeys {
  OutlierKeys() {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 64 * 128; ++i) {
      const bool outlier = i % 128 == 5 || i % 128 == 69;
      keys.push_back(normal(random) + (outlier ? 100.0F : 0.0F));
    }
    for (int d = 0; d < 128; ++d) query.push_back(normal(random));
    means.assign(128, 0.0F);
    means[5] = means[69] = 100.0F;
  }
  // What is read back.
  std::vector<float> stored(bool shift, bool hadamard) const {
    LayerConfig layer;
    layer.geometry = PageGeometry::make(Format::kNvfp4, FragmentOrder::kQuad, 128, 64).take();
    layer.num_kv_heads = layer.num_q_heads = 1;
    layer.key_rule = ScaleRule::kAmax6;
    layer.hadamard = hadamard;
    if (shift) layer.key_shift = means.data();
    StepPlan plan;
    plan.rule = make_shadow_rule(layer.geometry, 0, 0, false);
    plan.num_tokens = 64;
    for (int g = 0; g < 4; ++g) plan.writes.push_back({0, g, 0, 16, g * 16, -1, false});
    const std::int32_t page = 0;
    RequestPlan request;
    request.seq_len = 64;
    request.pages = &page;
    request.num_pages = 1;
    plan.requests.push_back(request);
    const std::int64_t bytes = layer.geometry.head_bytes;
    std::vector<std::uint8_t> memory(static_cast<std::size_t>(bytes));
    WriteParams w;
    w.layer = &layer;
    w.cache = {memory.data(), 1, bytes, bytes};
    w.key = {keys.data(), DType::kF32, 128, 128};
    w.value = w.key;
    w.plan = &plan;
    auto backend = make_backend("reference", {}).take();
    EXPECT_TRUE(backend->write(w).ok());
    AttendParams a;
    a.layer = &layer;
    a.cache = w.cache;
    a.plan = &plan;
    std::vector<float> k(keys.size());
    std::vector<float> v(keys.size());
    EXPECT_TRUE(backend->gather(a, 0, 0, 0, 64, k.data(), v.data()).ok());
    return k;
  }
  // The logits without their mean, which softmax does not see.
  std::vector<double> logits(const std::vector<float>& k) const {
    std::vector<double> out(64, 0.0);
    double mean = 0;
    for (std::size_t t = 0; t < 64; ++t) {
      for (std::size_t d = 0; d < 128; ++d) out[t] += double{query[d]} * k[t * 128 + d];
      mean += out[t] / 64;
    }
    for (double& x : out) x -= mean;
    return out;
  }
  double cosine(const std::vector<float>& k) const {
    const std::vector<double> a = logits(keys);
    const std::vector<double> b = logits(k);
    double ab = 0;
    double aa = 0;
    double bb = 0;
    for (std::size_t t = 0; t < 64; ++t) {
      ab += a[t] * b[t];
      aa += a[t] * a[t];
      bb += b[t] * b[t];
    }
    return ab / std::sqrt(aa * bb);
  }
  std::vector<float> keys, query, means;
};

TEST(WriteLimits, OutlierChannelsNeedTheirMeans) {
  const OutlierKeys o;
  // The outlier takes the block's scale, 16 or 18, and its 15 neighbours are zero.
  const std::vector<float> plain = o.stored(false, false);
  for (std::size_t t = 0; t < 64; ++t) {
    for (std::size_t d = 0; d < 16; ++d) {
      const float x = plain[t * 128 + d];
      EXPECT_TRUE(d == 5 ? x == 96.0F || x == 108.0F : x == 0.0F) << x;
    }
  }
  EXPECT_LT(o.cosine(plain), 0.95);
  // A relative error of .095 of independent values leaves 1 / sqrt(1 + .009).
  EXPECT_GE(o.cosine(o.stored(true, false)), 0.99);
  EXPECT_GE(o.cosine(o.stored(true, true)), 0.99);
}

}  // namespace
}  // namespace bitdecoding::test
