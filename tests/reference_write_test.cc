// SPDX-License-Identifier: Apache-2.0
// Quantize: bytes do not depend on how a sequence was cut, and are what the definition says.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "numeric/bf16.h"
#include "page/address.h"
#include "scale/rules.h"
#include "transform/hadamard.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

constexpr Format kFormats[] = {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows, Format::kNvfp4,
                               Format::kMxfp4};

const std::vector<std::int32_t> kPages = {7, 3, 11, 1, 20, 9, 8, 2};

std::vector<std::vector<std::uint8_t>> bytes_after(const WorldOptions& o,
                                                   const std::vector<std::int64_t>& chunks) {
  World w(o);
  const int s = w.add_sequence(kPages);
  std::uint32_t next = 0;
  for (const std::int64_t n : chunks) {
    EXPECT_TRUE(w.plan_step({{s, iota_tokens(next, n)}}).ok());
    EXPECT_TRUE(w.write().ok());
    next += static_cast<std::uint32_t>(n);
  }
  EXPECT_EQ(w.counters.requantized_prefix, 0U);
  std::vector<std::vector<std::uint8_t>> out;
  for (const std::int32_t page : kPages) out.push_back(w.page_bytes(page));
  return out;
}

TEST(ReferenceWrite, BytesDoNotDependOnChunks) {
  std::mt19937 engine(5);
  for (const Format f : kFormats) {
    for (const int tail : {0, 64}) {
      WorldOptions o;
      o.format = f;
      o.order = f == Format::kNvfp4 ? FragmentOrder::kFp4Mma : FragmentOrder::kQuad;
      o.tail_tokens = tail;
      const auto whole = bytes_after(o, {217});
      for (int trial = 0; trial < 6; ++trial) {
        std::vector<std::int64_t> chunks;
        for (std::int64_t left = 217; left > 0;) {
          const std::int64_t n = std::min<std::int64_t>(left, 1 + engine() % (trial < 3 ? 5 : 40));
          chunks.push_back(n);
          left -= n;
        }
        ASSERT_EQ(bytes_after(o, chunks), whole);
      }
    }
  }
}

TEST(ReferenceWrite, RejectedDraftsLeaveNoTrace) {
  for (const Format f : {Format::kNvfp4, Format::kMxfp4}) {
    WorldOptions o;
    o.format = f;
    for (const int tail : {0, 128}) {
      o.tail_tokens = tail;
      for (int accepted = 0; accepted <= 5; ++accepted) {
        World w(o);
        const int s = w.add_sequence(kPages);
        ASSERT_TRUE(w.step({{s, iota_tokens(0, 126)}}).status.ok());
        // Five drafts, of which the first `accepted` are right.
        std::vector<std::uint32_t> drafts = iota_tokens(126, 5);
        for (int i = accepted; i < 5; ++i) drafts[static_cast<std::size_t>(i)] += 1000;
        ASSERT_TRUE(w.step({{s, drafts}}).status.ok());
        w.reject(s, 5 - accepted);
        for (std::uint32_t t = 126 + static_cast<std::uint32_t>(accepted); t < 150; ++t) {
          ASSERT_TRUE(w.step({{s, {t}}}).status.ok());
        }
        EXPECT_EQ(w.counters.requantized_prefix, 0U);
        const auto clean = bytes_after(o, {126, 24});
        for (std::size_t i = 0; i < 3; ++i) {
          const auto got = w.page_bytes(kPages[i]);
          if (i < 2) {
            ASSERT_EQ(got, clean[i]) << accepted;
            continue;
          }
          // Rows past the end may hold keys of rejected drafts; what is visible must be equal.
          const PageGeometry& g = w.layer.geometry;
          std::uint64_t corrupt = 0;
          for (int row = 0; row < 150 - 128; ++row) {
            for (int d = 0; d < g.head_dim; ++d) {
              for (const Side side : {Side::kKey, Side::kValue}) {
                ASSERT_EQ(read_element(g, got.data(), side, row, d, 1.0F, &corrupt),
                          read_element(g, clean[i].data(), side, row, d, 1.0F, &corrupt));
              }
            }
          }
        }
      }
    }
  }
}

// The definition, step by step, for one row of K and one group of V.
TEST(ReferenceWrite, CodesAreTheDefinition) {
  for (const FragmentOrder order : {FragmentOrder::kFp4Mma, FragmentOrder::kQuad}) {
    for (const int dim : kHeadDims) {
      WorldOptions o;
      o.order = order;
      o.head_dim = dim;
      o.outer_exponent = 2;
      World w(o);
      const int s = w.add_sequence(kPages);
      ASSERT_TRUE(w.step({{s, iota_tokens(0, 70)}}).status.ok());
      const PageGeometry& g = w.layer.geometry;
      std::uint64_t corrupt = 0;
      for (int p = 0; p < 70; ++p) {
        const std::uint8_t* head = w.head_bytes(kPages[static_cast<std::size_t>(p / 64)], 1);
        std::vector<float> k;
        for (int d = 0; d < dim; ++d) {
          k.push_back(round_to_bf16(w.key_of(static_cast<std::uint32_t>(p), p, 1, d)) -
                      w.shift_of(1, d));
        }
        hadamard(k.data(), dim);
        for (int base = 0; base < dim; base += 16) {
          const float scale = decode_e4m3(FourSix::choose(k.data() + base, 16, 4.0F)) * 4.0F;
          for (int i = 0; i < 16; ++i) {
            const float x = k[static_cast<std::size_t>(base + i)];
            const float expected = decode_e2m1(encode_e2m1(x / scale)) * scale;
            ASSERT_EQ(read_element(g, head, Side::kKey, p % 64, base + i, 4.0F, &corrupt),
                      expected);
          }
        }
        for (int d = 0; d < dim; ++d) {
          float block[16];
          for (int i = 0; i < 16; ++i) {
            const int row = p / 16 * 16 + i;
            block[i] = row >= 70
                           ? 0.0F
                           : round_to_bf16(w.value_of(static_cast<std::uint32_t>(row), row, 1, d)) -
                                 w.value_shift_of(1, d);
          }
          const float scale = decode_e4m3(Amax6::choose(block, 16, 4.0F)) * 4.0F;
          ASSERT_EQ(read_element(g, head, Side::kValue, p % 64, d, 4.0F, &corrupt),
                    decode_e2m1(encode_e2m1(block[p % 16] / scale)) * scale);
        }
      }
      EXPECT_EQ(corrupt, 0U);
    }
  }
}

// Blocks whose magnitudes differ by powers of two: a scale that lands in another block's place
// changes values by a factor, where N(0, 1) would hide it.
TEST(ReferenceWrite, ScalesBelongToTheirBlocks) {
  for (const Format f : {Format::kNvfp4Rows, Format::kNvfp4, Format::kMxfp4}) {
    for (const FragmentOrder order : {FragmentOrder::kFp4Mma, FragmentOrder::kQuad}) {
      for (const int dim : kHeadDims) {
        const PageGeometry g = PageGeometry::make(f, order, dim, 64).take();
        const int n = scale_block(f);
        LayerConfig layer;
        layer.geometry = g;
        layer.num_kv_heads = layer.num_q_heads = 1;
        layer.hadamard = false;
        layer.key_rule = layer.value_rule =
            f == Format::kMxfp4 ? ScaleRule::kMxfp4Floor : ScaleRule::kAmax6;
        std::vector<float> k(static_cast<std::size_t>(64 * dim));
        std::vector<float> v(k.size());
        for (int t = 0; t < 64; ++t) {
          for (int d = 0; d < dim; ++d) {
            const auto i = static_cast<std::size_t>(t * dim + d);
            // 6 * 2^e for every element of a block: stored without error.
            k[i] = 6.0F * std::ldexp(1.0F, (d / n + 5 * t) % 7 - 3);
            const int block = is_tiled(f) ? t / n : d / n;
            v[i] = -6.0F * std::ldexp(1.0F, (3 * block + (is_tiled(f) ? d : t)) % 7 - 3);
          }
        }
        std::vector<std::uint8_t> page(static_cast<std::size_t>(g.head_bytes), 0xFF);
        StepPlan plan;
        plan.rule = make_shadow_rule(g, 0, 0, false);
        plan.num_tokens = 64;
        for (int group = 0; group < g.groups_per_page; ++group) {
          plan.writes.push_back({0, group, 0, g.group_tokens, group * g.group_tokens, -1, false});
        }
        WriteParams p;
        p.layer = &layer;
        p.cache = {page.data(), 1, g.head_bytes, g.head_bytes};
        p.key = {k.data(), DType::kF32, dim, dim};
        p.value = {v.data(), DType::kF32, dim, dim};
        p.plan = &plan;
        auto backend = make_backend("reference", {}).take();
        const Status status = backend->write(p);
        ASSERT_TRUE(status.ok()) << status.message();
        std::uint64_t corrupt = 0;
        for (int t = 0; t < 64; ++t) {
          for (int d = 0; d < dim; ++d) {
            const auto i = static_cast<std::size_t>(t * dim + d);
            ASSERT_EQ(read_element(g, page.data(), Side::kKey, t, d, 1.0F, &corrupt), k[i]);
            ASSERT_EQ(read_element(g, page.data(), Side::kValue, t, d, 1.0F, &corrupt), v[i]);
          }
        }
      }
    }
  }
}

TEST(ReferenceWrite, NonFiniteInputIsCountedAndStoredAsZero) {
  for (const Format f : kFormats) {
    WorldOptions o;
    o.format = f;
    o.num_kv_heads = o.num_q_heads = 1;
    o.hadamard = false;
    o.shift = false;
    o.value_shift = false;
    World w(o);
    const int s = w.add_sequence(kPages);
    ASSERT_TRUE(w.plan_step({{s, iota_tokens(0, 3)}}).ok());
    std::vector<float> k(static_cast<std::size_t>(3 * o.head_dim), 1.0F);
    std::vector<float> v = k;
    k[5] = NAN;
    k[70] = INFINITY;
    v[9] = -INFINITY;
    v[10] = std::numeric_limits<float>::max();  // rounds to infinity in BF16
    ASSERT_TRUE(w.write_rows(k, v).ok());
    EXPECT_EQ(w.counters.non_finite, 4U);
    const PageGeometry& g = w.layer.geometry;
    std::uint64_t corrupt = 0;
    const std::uint8_t* head = w.head_bytes(kPages[0], 0);
    EXPECT_EQ(read_element(g, head, Side::kKey, 0, 5, 1.0F, &corrupt), 0.0F);
    EXPECT_EQ(read_element(g, head, Side::kKey, 1, 6, 1.0F, &corrupt), 0.0F);
    EXPECT_EQ(read_element(g, head, Side::kValue, 0, 9, 1.0F, &corrupt), 0.0F);
    EXPECT_EQ(read_element(g, head, Side::kValue, 0, 10, 1.0F, &corrupt), 0.0F);
    EXPECT_NEAR(read_element(g, head, Side::kKey, 0, 4, 1.0F, &corrupt), 1.0F, 0.07);
    for (const ShadowSpan& span : w.plan.spans) EXPECT_GE(span.slot, 0);
  }
}

TEST(ReferenceWrite, TypesOfInputGiveTheSameBytes) {
  WorldOptions o;
  o.dtype = DType::kBf16;
  World a(o);
  const int s = a.add_sequence(kPages);
  ASSERT_TRUE(a.step({{s, iota_tokens(0, 40)}}).status.ok());
  // The same numbers as float32.
  World b(o);
  const int t = b.add_sequence(kPages);
  ASSERT_TRUE(b.plan_step({{t, iota_tokens(0, 40)}}).ok());
  std::vector<float> k;
  std::vector<float> v;
  for (int p = 0; p < 40; ++p) {
    for (int h = 0; h < o.num_kv_heads; ++h) {
      for (int d = 0; d < o.head_dim; ++d) {
        k.push_back(b.key_of(static_cast<std::uint32_t>(p), p, h, d));
        v.push_back(b.value_of(static_cast<std::uint32_t>(p), p, h, d));
      }
    }
  }
  ASSERT_TRUE(b.write_rows(k, v).ok());
  EXPECT_EQ(a.page_bytes(kPages[0]), b.page_bytes(kPages[0]));
}

}  // namespace
}  // namespace bitdecoding::test
