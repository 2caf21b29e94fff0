// SPDX-License-Identifier: Apache-2.0
// What attention promises beyond its numbers, on every backend: causality, reuse of pages, runs
// that were cut in other ways.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "attend/visibility.h"
#include "page/address.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

const std::vector<std::int32_t> kPages = {7, 3, 11, 1, 20, 9, 8, 2};

std::vector<float> row_of(const World& w, const StepResult& r, std::int64_t row) {
  const auto n = static_cast<std::size_t>(w.options.num_q_heads * w.options.head_dim);
  const auto begin = r.output.begin() + static_cast<std::ptrdiff_t>(n) * row;
  return {begin, begin + static_cast<std::ptrdiff_t>(n)};
}

// Outputs of every position of a sequence that is fed in the given chunks.
std::vector<std::vector<float>> outputs_in_chunks(World& w, int s, std::uint32_t first,
                                                  const std::vector<std::int64_t>& chunks) {
  std::vector<std::vector<float>> out;
  for (const std::int64_t n : chunks) {
    const StepResult r = w.step({{s, iota_tokens(first, n)}});
    EXPECT_TRUE(r.status.ok()) << r.status.message();
    if (!r.status.ok()) return out;
    for (std::int64_t i = 0; i < n; ++i) out.push_back(row_of(w, r, i));
    first += static_cast<std::uint32_t>(n);
  }
  return out;
}

constexpr Format kFormats[] = {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows, Format::kNvfp4,
                               Format::kMxfp4};

// Suites whose parameter is the backend.
class OnBackend : public testing::TestWithParam<std::string> {
 protected:
  static WorldOptions options() {
    WorldOptions o;
    o.backend = GetParam();
    return o;
  }
};
class Reproducible : public OnBackend {};
class Default : public OnBackend {};
class Causality : public OnBackend {};
class Strides : public OnBackend {};
class Windows : public OnBackend {};
class EmptyRows : public OnBackend {};
class LostRows : public OnBackend {};

const auto kBackends = testing::ValuesIn(backend_names());
std::string backend_of(const testing::TestParamInfo<std::string>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(Backend, Reproducible, kBackends, backend_of);
INSTANTIATE_TEST_SUITE_P(Backend, Default, kBackends, backend_of);
INSTANTIATE_TEST_SUITE_P(Backend, Causality, kBackends, backend_of);
INSTANTIATE_TEST_SUITE_P(Backend, Strides, kBackends, backend_of);
INSTANTIATE_TEST_SUITE_P(Backend, Windows, kBackends, backend_of);
INSTANTIATE_TEST_SUITE_P(Backend, EmptyRows, kBackends, backend_of);
INSTANTIATE_TEST_SUITE_P(Backend, LostRows, kBackends, backend_of);

TEST_P(Reproducible, ResultsAreAFunctionOfTheTokens) {
  std::mt19937 engine(3);
  for (const Format f : kFormats) {
    for (const Arithmetic arithmetic : {Arithmetic::kWide, Arithmetic::kFp4}) {
      if (arithmetic == Arithmetic::kFp4 && !is_tiled(f)) continue;
      WorldOptions o = options();
      o.format = f;
      o.arithmetic = arithmetic;
      o.reproducible = true;
      o.num_kv_heads = 1;
      o.num_q_heads = 2;
      World one(o);
      const auto whole = outputs_in_chunks(one, one.add_sequence(kPages), 0, {180});
      for (int trial = 0; trial < 2; ++trial) {
        std::vector<std::int64_t> chunks;
        for (std::int64_t left = 180; left > 0;) {
          const std::int64_t n =
              std::min<std::int64_t>(left, 1 + engine() % (trial % 2 == 0 ? 7 : 60));
          chunks.push_back(n);
          left -= n;
        }
        World cut(o);
        ASSERT_EQ(outputs_in_chunks(cut, cut.add_sequence(kPages), 0, chunks), whole);
        EXPECT_EQ(cut.directory->totals().missing_tokens, 0U);
      }
    }
  }
}

TEST_P(Reproducible, PrefixHitsPreemptionAndDraftsChangeNothing) {
  for (const Format f : {Format::kNvfp4, Format::kMxfp4}) {
    WorldOptions o = options();
    o.format = f;
    o.reproducible = true;
    o.num_kv_heads = 1;
    o.num_q_heads = 2;
    World clean(o);
    const auto whole = outputs_in_chunks(clean, clean.add_sequence(kPages), 0, {200});
    World w(o);
    const int a = w.add_sequence({0, 1, 2, 3});
    outputs_in_chunks(w, a, 0, {150});
    // A prefix hit: two full pages are shared, the rest is computed into other pages.
    const int b = w.add_sequence({0, 1, 5, 6});
    w.sequences[static_cast<std::size_t>(b)].tokens = iota_tokens(0, 128);
    const auto hit = outputs_in_chunks(w, b, 128, {20, 1, 1, 30});
    for (std::size_t i = 0; i < hit.size(); ++i) ASSERT_EQ(hit[i], whole[128 + i]);
    // Preempted: its pages go to another sequence, then it is computed again elsewhere.
    outputs_in_chunks(w, w.add_sequence({6, 5, 7}), 9000, {170});
    const int c = w.add_sequence({5, 7, 6, 8});
    const auto again = outputs_in_chunks(w, c, 0, {70, 100});
    for (std::size_t i = 0; i < again.size(); ++i) ASSERT_EQ(again[i], whole[i]);
    // Drafts that are rejected over a group and a page edge.
    const int d = w.add_sequence({9, 10, 11, 12});
    outputs_in_chunks(w, d, 0, {126});
    ASSERT_TRUE(w.step({{d, {126, 5001, 5002, 5003, 5004}}}).status.ok());
    w.reject(d, 4);
    const auto after = outputs_in_chunks(w, d, 127, {1, 4, 1});
    for (std::size_t i = 0; i < after.size(); ++i) ASSERT_EQ(after[i], whole[127 + i]);
    EXPECT_EQ(w.directory->totals().missing_tokens, 0U);
  }
}

TEST_P(Default, DecodeDoesNotDependOnHowThePromptWasCut) {
  // Decode reads pages and shadow slots alone, so its result is bit-equal; only prefill chunks
  // differ, where a chunk reads itself unrounded.
  for (const Format f : kFormats) {
    WorldOptions o = options();
    o.format = f;
    World a(o);
    World b(o);
    const int s = a.add_sequence(kPages);
    const int t = b.add_sequence(kPages);
    outputs_in_chunks(a, s, 0, {140});
    outputs_in_chunks(b, t, 0, {9, 1, 64, 3, 20, 43});
    for (std::uint32_t i = 140; i < 150; ++i) {
      ASSERT_EQ(a.step({{s, {i}}}).output, b.step({{t, {i}}}).output);
    }
  }
}

TEST_P(Causality, NoRowSeesALaterToken) {
  for (const Format f : {Format::kNvfp4, Format::kMxfp4, Format::kNvfp4Rows}) {
    for (const std::int64_t query : {std::int64_t{4}, std::int64_t{12}}) {
      for (const bool reproducible : {false, true}) {
        WorldOptions o = options();
        o.format = f;
        o.reproducible = reproducible;
        o.num_kv_heads = 1;
        o.num_q_heads = 2;
        // Values of rejected or later tokens change V's block scale in pages, so only BF16 or
        // unblocked sources are free of them; the tail covers the last rows here.
        World a(o);
        const int s = a.add_sequence(kPages);
        outputs_in_chunks(a, s, 0, {60 - query});
        const auto first = static_cast<std::uint32_t>(60 - query);
        const StepResult base = a.step({{s, iota_tokens(first, query)}});
        ASSERT_TRUE(base.status.ok());
        for (std::int64_t marked = 0; marked < query; marked += 3) {
          World b(o);
          const int t = b.add_sequence(kPages);
          outputs_in_chunks(b, t, 0, {60 - query});
          std::vector<std::uint32_t> tokens = iota_tokens(first, query);
          tokens[static_cast<std::size_t>(marked)] += 777;
          const StepResult r = b.step({{t, tokens}});
          for (std::int64_t row = 0; row < query; ++row) {
            if (row < marked) {
              ASSERT_EQ(row_of(b, r, row), row_of(a, base, row));
            } else {
              ASSERT_NE(row_of(b, r, row), row_of(a, base, row));
            }
          }
        }
      }
    }
  }
}

TEST_P(Strides, PaddedAndHeadMajorCachesGiveTheSameOutput) {
  for (const Format f : {Format::kNvfp4, Format::kBf16}) {
    WorldOptions o = options();
    o.format = f;
    World compact(o);
    o.page_padding = 2048;
    World padded(o);
    World head_major(o);
    // [head][page]: all pages of a head follow each other.
    head_major.cache.stride_page = head_major.layer.geometry.head_bytes;
    head_major.cache.stride_head = head_major.cache.stride_page * o.num_pages;
    const int a = compact.add_sequence(kPages);
    const int b = padded.add_sequence(kPages);
    const int c = head_major.add_sequence(kPages);
    ASSERT_EQ(a + b + c, 0);
    for (const std::int64_t n : {100, 1, 3}) {
      const StepResult want = compact.step({{0, iota_tokens(0, n)}});
      ASSERT_TRUE(want.status.ok());
      ASSERT_EQ(padded.step({{0, iota_tokens(0, n)}}).output, want.output);
      ASSERT_EQ(head_major.step({{0, iota_tokens(0, n)}}).output, want.output);
    }
  }
}

TEST_P(Windows, DroppedPagesAreNeverRead) {
  for (const Format f : {Format::kNvfp4, Format::kFp8E4m3}) {
    WorldOptions o = options();
    o.format = f;
    o.sink_tokens = 0;
    World full(o);
    World dropped(o);
    full.params.window_left = dropped.params.window_left = 50;
    const int s = full.add_sequence(kPages);
    const int t = dropped.add_sequence(kPages);
    outputs_in_chunks(full, s, 0, {250});
    outputs_in_chunks(dropped, t, 0, {250});
    dropped.sequences[0].pages[0] = -1;
    dropped.sequences[0].pages[1] = -1;
    std::memset(dropped.head_bytes(kPages[0], 0), 0x7F,
                static_cast<std::size_t>(dropped.cache.stride_page));
    const StepResult a = full.step({{s, {250, 251}}});
    const StepResult b = dropped.step({{t, {250, 251}}});
    ASSERT_TRUE(b.status.ok()) << b.status.message();
    EXPECT_EQ(a.output, b.output);
    // A wider window needs the page: a sentence, and nothing is read.
    dropped.params.window_left = -1;
    const StepResult c = dropped.step({{t, {252}}});
    EXPECT_EQ(c.status.code(), StatusCode::kOutOfRange);
    EXPECT_NE(c.status.message().find("block table"), std::string::npos);
  }
}

TEST_P(EmptyRows, AreZeroWithLseMinusInfinity) {
  WorldOptions o = options();
  World w(o);
  const std::vector<float> sinks(4, 1.0F);
  w.params.attn_sink = sinks.data();
  const int s = w.add_sequence(kPages);
  // Four query rows, one token: what a captured graph replays for a short sequence.
  ASSERT_TRUE(w.plan_step({{s, {1, 2, 3, 4}, 3}}).ok());
  w.plan.requests[0].seq_len = 1;
  w.plan.requests[0].num_pages = 1;
  w.plan.requests[0].num_spans = 0;
  w.plan.writes.clear();
  std::memset(w.head_bytes(kPages[0], 0), 0, static_cast<std::size_t>(w.cache.stride_page));
  const StepResult r = w.attend();
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  const std::vector<float> zero(static_cast<std::size_t>(o.num_q_heads * o.head_dim), 0.0F);
  for (std::int64_t row = 0; row < 3; ++row) {
    EXPECT_EQ(row_of(w, r, row), zero);
    for (int h = 0; h < 4; ++h) {
      EXPECT_EQ(r.lse[static_cast<std::size_t>(4 * row + h)], -INFINITY);
    }
  }
  for (int h = 0; h < 4; ++h) EXPECT_TRUE(std::isfinite(r.lse[static_cast<std::size_t>(12 + h)]));
}

TEST_P(EmptyRows, RowsOfNoRequestAreLeftAlone) {
  WorldOptions o = options();
  World w(o);
  const int s = w.add_sequence(kPages);
  ASSERT_TRUE(w.plan_step({{s, iota_tokens(0, 5)}}).ok());
  ASSERT_TRUE(w.write().ok());
  w.plan.requests[0].query_begin = 2;
  w.plan.requests[0].query_len = 2;
  const StepResult r = w.attend();
  ASSERT_TRUE(r.status.ok());
  for (const std::int64_t row : {0, 1, 4}) {
    for (const float x : row_of(w, r, row)) EXPECT_TRUE(std::isnan(x));
  }
  for (const std::int64_t row : {2, 3}) {
    for (const float x : row_of(w, r, row)) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST_P(LostRows, AGroupContinuesFromItsOwnCodesAndIsCounted) {
  WorldOptions o = options();
  o.num_slots = 0;
  World w(o);
  const int s = w.add_sequence(kPages);
  for (std::uint32_t t = 0; t < 40; ++t) {
    const StepResult r = w.step({{s, {t}}});
    ASSERT_TRUE(r.status.ok()) << r.status.message();
    for (const float x : r.output) ASSERT_TRUE(std::isfinite(x));
  }
  EXPECT_EQ(w.counters.requantized_prefix, 40U - 3U);
  EXPECT_EQ(w.directory->totals().lost_partial_groups, 40U - 3U);
  // Repeated quantization costs accuracy, but values stay themselves.
  std::uint64_t corrupt = 0;
  double error = 0;
  double norm = 0;
  for (int p = 0; p < 40; ++p) {
    for (int d = 0; d < o.head_dim; ++d) {
      const float v = w.value_of(static_cast<std::uint32_t>(p), p, 0, d) - w.value_shift_of(0, d);
      const float got = read_element(w.layer.geometry, w.head_bytes(kPages[0], 0), Side::kValue, p,
                                     d, 1.0F, &corrupt);
      error += (v - got) * (v - got);
      norm += v * v;
    }
  }
  EXPECT_TRUE(std::sqrt(error / norm) <= 0.25);
}

// More rows than kMaxDecodeQueries are a chunk, whose tokens stay: where the tail begins with the
// page, a group that one completes leaves BF16 at once. Rejecting its tokens after all is counted.
TEST_P(LostRows, ChunksThatAreRejectedAreCounted) {
  for (const std::int64_t rows : {8, 17}) {
    WorldOptions o = options();
    o.reproducible = true;
    World w(o);
    const int s = w.add_sequence(kPages);
    outputs_in_chunks(w, s, 0, {257 - rows, rows});
    w.reject(s, 2);
    const auto out = outputs_in_chunks(w, s, 255, {1});
    for (const float x : out.at(0)) ASSERT_TRUE(std::isfinite(x));
    const std::uint64_t lost = rows == 8 ? 0 : 1;
    EXPECT_EQ(w.counters.requantized_prefix, lost);
    EXPECT_EQ(w.directory->totals().lost_partial_groups, lost);
    EXPECT_EQ(w.directory->totals().missing_tokens, 15 * lost);
  }
}

TEST(Segments, CoverTheVisibleRangeOnce) {
  WorldOptions o;
  for (const bool reproducible : {false, true}) {
    for (const std::int64_t query : {1, 8, 9, 100}) {
      o.reproducible = reproducible;
      World w(o);
      const int s = w.add_sequence(kPages);
      ASSERT_TRUE(w.plan_step({{s, iota_tokens(0, 300 - query)}}).ok());
      ASSERT_TRUE(w.plan_step({{s, iota_tokens(300, query)}}).ok());
      const RequestPlan& r = w.plan.requests[0];
      std::vector<Segment> segments;
      for (std::int64_t i = 0; i < query; ++i) {
        for (const int window : {-1, 0, 5, 70, 1000}) {
          const std::int64_t q = query_position(r, i);
          visible_segments(w.plan.rule, r, q, window, &segments);
          std::int64_t next = visible_begin(q, window);
          for (const Segment& seg : segments) {
            ASSERT_EQ(seg.begin, next);
            ASSERT_LT(seg.begin, seg.end);
            next = seg.end;
          }
          ASSERT_EQ(next, q + 1);
        }
      }
      visible_segments(w.plan.rule, r, -1, -1, &segments);
      EXPECT_TRUE(segments.empty());
    }
  }
}

}  // namespace
}  // namespace bitdecoding::test
