// SPDX-License-Identifier: Apache-2.0
// The reference backend against a dense softmax that shares no attention code with it.
#include <gtest/gtest.h>

#include <cmath>

#include "dense_oracle.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

// The rule of attend.h for one position, in the test's own words.
Read expected_read(const World& w, std::int64_t p, std::int64_t q, std::int64_t n,
                   std::int64_t chunk_begin) {
  const std::int64_t sink = w.options.sink_tokens;
  const std::int64_t group = w.layer.geometry.group_tokens;
  const std::int64_t tail = w.options.tail_tokens;
  const std::int64_t of = (w.options.reproducible ? q : chunk_begin) + 1;
  std::int64_t tail_begin = of > tail ? (of - tail) / group * group : 0;
  if (w.options.reproducible) {
    tail_begin = std::max(tail_begin, q / w.options.page_size * w.options.page_size);
  } else if (n - chunk_begin > 8 && p >= chunk_begin) {
    return Read::kRaw;
  }
  if (!is_tiled(w.options.format) && tail == 0) tail_begin = n;
  return p < sink || p >= tail_begin ? Read::kRounded : Read::kPage;
}

void expect_equal_to_dense(World& w, const std::vector<Work>& work, const StepResult& result) {
  ASSERT_TRUE(result.status.ok()) << result.status.message();
  DenseOracle oracle(w);
  std::int64_t row = 0;
  for (const Work& item : work) {
    const auto n = static_cast<std::int64_t>(
        w.sequences[static_cast<std::size_t>(item.sequence)].tokens.size());
    const auto len = static_cast<std::int64_t>(item.tokens.size());
    for (std::int64_t i = 0; i < len; ++i, ++row) {
      if (i % 31 != 0 && i + 3 < len) continue;  // the oracle is slow
      const std::int64_t q = n - len + i;
      const std::int64_t begin =
          w.params.window_left < 0 ? 0 : std::max<std::int64_t>(0, q - w.params.window_left);
      std::vector<Read> reads;
      for (std::int64_t p = begin; p <= q; ++p) reads.push_back(expected_read(w, p, q, n, n - len));
      for (int h = 0; h < w.options.num_q_heads; h += std::max(1, w.options.num_q_heads - 1)) {
        const Dense dense = oracle.attend(item.sequence, q, h, begin, reads);
        const auto at = static_cast<std::size_t>(row * w.options.num_q_heads + h);
        for (int d = 0; d < w.options.head_dim; ++d) {
          const double expected = dense.output[static_cast<std::size_t>(d)];
          const double got = result.output[at * static_cast<std::size_t>(w.options.head_dim) +
                                           static_cast<std::size_t>(d)];
          // Both sides are double; what is left is the output's one rounding to float32.
          const double tolerance = 1.01 * 0x1p-24 * std::fabs(expected) + 1e-12;
          ASSERT_TRUE(std::fabs(got - expected) <= tolerance)
              << "row " << row << " head " << h << " dim " << d << ": " << got << " against "
              << expected;
        }
        ASSERT_TRUE(std::fabs(result.lse[at] - dense.lse) <=
                    1.01 * 0x1p-24 * std::fabs(dense.lse) + 1e-12);
      }
    }
  }
}

void run_sequence(const WorldOptions& options, const std::vector<std::int64_t>& chunks,
                  const AttendParams& masks = {}) {
  World w(options);
  w.params.softcap = masks.softcap;
  w.params.window_left = masks.window_left;
  w.params.attn_sink = masks.attn_sink;
  const int s = w.add_sequence({7, 3, 11, 1, 20, 9, 8, 2});
  std::uint32_t next = 0;
  for (const std::int64_t n : chunks) {
    const std::vector<Work> work = {{s, iota_tokens(next, n)}};
    next += static_cast<std::uint32_t>(n);
    const StepResult result = w.step(work);
    expect_equal_to_dense(w, work, result);
    EXPECT_EQ(w.plan.counters.lost_partial_groups, 0U);
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_EQ(w.corrupt_scales, 0U);
  EXPECT_EQ(w.directory->totals().refused_groups, 0U);
}

const std::vector<std::int64_t> kChunks = {130, 1, 8, 9, 22, 1};

class FormatTest : public testing::TestWithParam<std::tuple<Format, int, bool>> {};

TEST_P(FormatTest, EqualsDenseSoftmax) {
  WorldOptions o;
  o.format = std::get<0>(GetParam());
  o.head_dim = std::get<1>(GetParam());
  o.order = std::get<2>(GetParam()) ? FragmentOrder::kFp4Mma : FragmentOrder::kQuad;
  // Rows have one order only.
  if (!is_tiled(o.format) && o.order == FragmentOrder::kFp4Mma) return;
  o.outer_exponent = o.format == Format::kBf16 || o.format == Format::kFp8E4m3 ? 0 : -3;
  run_sequence(o, kChunks);
  o.reproducible = true;
  run_sequence(o, kChunks);
}

INSTANTIATE_TEST_SUITE_P(All, FormatTest,
                         testing::Combine(testing::Values(Format::kBf16, Format::kFp8E4m3,
                                                          Format::kNvfp4Rows, Format::kNvfp4,
                                                          Format::kMxfp4),
                                          testing::Values(64, 96, 128, 192, 256), testing::Bool()));

TEST(ReferenceAttend, MasksEqualDenseSoftmax) {
  const std::vector<float> sinks = {-3.0F, 0.5F, 3.0F, 40.0F};
  for (const int window : {-1, 0, 1, 15, 16, 63, 64, 100, 1000}) {
    for (const float softcap : {0.0F, 2.0F, 50.0F}) {
      for (const float* sink : {static_cast<const float*>(nullptr), sinks.data()}) {
        AttendParams masks;
        masks.window_left = window;
        masks.softcap = softcap;
        masks.attn_sink = sink;
        WorldOptions o;
        o.tail_tokens = 16;
        run_sequence(o, {90, 1, 3}, masks);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(ReferenceAttend, RulesWithoutSinkOrTail) {
  for (const Format f : {Format::kNvfp4, Format::kMxfp4, Format::kNvfp4Rows, Format::kBf16}) {
    for (const int sink : {0, 4, 20}) {
      for (const int tail : {0, 1, 40}) {
        WorldOptions o;
        o.format = f;
        o.sink_tokens = sink;
        o.tail_tokens = tail;
        run_sequence(o, {70, 1, 5, 12, 1});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(ReferenceAttend, GroupSizesAndTypes) {
  for (const int group : {1, 2, 3, 5, 7, 9, 12, 16, 24, 32, 64}) {
    WorldOptions o;
    o.num_kv_heads = 1;
    o.num_q_heads = group;
    run_sequence(o, {33, 1});
    if (HasFatalFailure()) return;
  }
}

TEST(ReferenceAttend, RequestsOfOneStepAreIndependent) {
  WorldOptions o;
  World together(o);
  World alone(o);
  const int a = together.add_sequence({0, 1, 2});
  const int b = together.add_sequence({5, 4, 3});
  const int c = alone.add_sequence({5, 4, 3});
  ASSERT_TRUE(together.step({{a, iota_tokens(0, 80)}, {b, iota_tokens(500, 100)}}).status.ok());
  ASSERT_TRUE(alone.step({{c, iota_tokens(500, 100)}}).status.ok());
  const StepResult x = together.step({{a, {80}}, {b, {600, 601}}});
  const StepResult y = alone.step({{c, {600, 601}}});
  const std::size_t row = static_cast<std::size_t>(o.num_q_heads * o.head_dim);
  ASSERT_EQ(x.output.size(), 3 * row);
  EXPECT_TRUE(std::equal(y.output.begin(), y.output.end(),
                         x.output.begin() + static_cast<std::ptrdiff_t>(row)));
}

}  // namespace
}  // namespace bitdecoding::test
