// SPDX-License-Identifier: Apache-2.0
// The directory's rules, driven through StepInput alone.
#include <algorithm>
#include <random>

#include "directory_bench.h"

namespace bitdecoding {
namespace {

TEST(ShadowRuleTest, TailBegin) {
  ShadowRule rule{16, 64, 16, false, 128};
  EXPECT_EQ(rule.tail_begin(0), 0);
  EXPECT_EQ(rule.tail_begin(64), 0);
  EXPECT_EQ(rule.tail_begin(79), 0);
  EXPECT_EQ(rule.tail_begin(80), 16);
  EXPECT_EQ(rule.tail_begin(200), 128);
  rule.tail_tokens = 0;
  EXPECT_EQ(rule.tail_begin(31), 16);
  EXPECT_EQ(rule.tail_begin(32), 32);
  rule.tail_tokens = 64;
  rule.reproducible = true;
  EXPECT_EQ(rule.tail_begin(128), 64);
  EXPECT_EQ(rule.tail_begin(129), 128);
  rule.tail_tokens = -1;
  EXPECT_EQ(rule.tail_begin(77), 77);
}

TEST(ShadowDirectoryTest, PositionsInBf16FollowTheRuleAtEveryLength) {
  for (const int sink : {0, 4, 16, 40}) {
    for (const int tail : {0, 16, 64, 100}) {
      DirectoryBench b(sink, tail, 64);
      for (std::int64_t n = 1; n <= 400; ++n) {
        ASSERT_TRUE(b.step({{pages_of(3, 7), n, 1}}).ok());
        const std::vector<bool> covered = b.covered(0);
        const std::int64_t begin = b.rule_.tail_begin(n);
        for (std::int64_t p = 0; p < n; ++p) {
          ASSERT_EQ(covered[static_cast<std::size_t>(p)], p < sink || p >= begin) << n << " " << p;
        }
        EXPECT_EQ(b.plan.counters.missing_tokens, 0U);
        EXPECT_EQ(b.plan.counters.lost_partial_groups, 0U);
      }
    }
  }
}

TEST(ShadowDirectoryTest, TheBf16PartIsBoundedOverManySteps) {
  DirectoryBench b(16, 64, 8, false, Format::kNvfp4, 64, 128);
  // 8 slots: sink, five tail groups, one more while a group completes, one spare.
  for (std::int64_t n = 1; n <= 900; ++n) {
    ASSERT_TRUE(b.step({{pages_of(0, 15), n, 1}}).ok());
    const auto covered = b.covered(0);
    EXPECT_LE(std::count(covered.begin(), covered.end(), true), 16 + 64 + 15);
    EXPECT_EQ(b.plan.counters.missing_tokens, 0U);
    EXPECT_LE(b.directory->used_slots(), 8);
  }
  EXPECT_EQ(b.directory->totals().refused_groups, 0U);
  EXPECT_GT(b.directory->totals().evicted_slots, 0U);
}

TEST(ShadowDirectoryTest, ShortSequencesAreAllBf16) {
  for (const std::int64_t n : {0, 1, 2, 15, 16, 17, 80}) {
    DirectoryBench b(16, 64, 16);
    ASSERT_TRUE(b.step({{pages_of(0, 2), n, n}}).ok());
    const auto covered = b.covered(0);
    EXPECT_EQ(std::count(covered.begin(), covered.end(), true), n);
  }
}

TEST(ShadowDirectoryTest, AGroupEnteredInItsMiddleKeepsItsSlotWhenItCompletes) {
  DirectoryBench b(0, 0, 4);
  ASSERT_TRUE(b.step({{pages_of(0, 4), 10, 10}}).ok());
  const std::int32_t slot = b.directory->find(0, 0);
  ASSERT_GE(slot, 0);
  ASSERT_TRUE(b.step({{pages_of(0, 4), 40, 30}}).ok());  // completes group 0, fills 1, begins 2
  ASSERT_EQ(b.plan.writes.size(), 3U);
  EXPECT_EQ(b.plan.writes[0].slot, slot);
  EXPECT_TRUE(b.plan.writes[0].prefix_in_slot);
  EXPECT_EQ(b.plan.writes[0].first_row, 10);
  EXPECT_EQ(b.plan.writes[0].num_rows, 6);
  EXPECT_EQ(b.plan.writes[1].slot, -1);
  EXPECT_GE(b.plan.writes[2].slot, 0);
  EXPECT_EQ(b.plan.writes[2].num_rows, 8);
  EXPECT_EQ(b.plan.writes[2].source, 22);
}

TEST(ShadowDirectoryTest, ARecycledPageDropsItsStaleEntries) {
  DirectoryBench b(16, 64, 64);
  ASSERT_TRUE(b.step({{pages_of(0, 2), 100, 100}}).ok());
  EXPECT_GE(b.directory->find(1, 0), 0);
  EXPECT_GE(b.directory->find(0, 2), 0);
  // The pages go to another request in the other order; group 0 of page 1 becomes its sink and the
  // middle groups of page 0 are outside its tail at length 500.
  ASSERT_TRUE(b.step({{{1, 0, 5, 6, 7, 8, 9, 10}, 500, 500}}).ok());
  for (int group = 0; group < 4; ++group) EXPECT_EQ(b.directory->find(0, group), -1);
  EXPECT_GE(b.directory->find(1, 0), 0);
  EXPECT_EQ(b.directory->find(1, 1), -1);
}

TEST(ShadowDirectoryTest, SinksAreSharedByPage) {
  DirectoryBench b(16, 64, 64);
  ASSERT_TRUE(b.step({{{0, 1, 2}, 128, 128}}).ok());
  const std::int32_t sink = b.directory->find(0, 0);
  ASSERT_TRUE(b.step({{{0, 1, 3}, 140, 12}, {{0, 1, 4}, 130, 2}}).ok());
  for (std::size_t r = 0; r < 2; ++r) {
    ASSERT_GT(b.plan.requests[r].num_spans, 0);
    EXPECT_EQ(b.plan.requests[r].spans[0].slot, sink);
    EXPECT_EQ(b.plan.requests[r].spans[0].begin, 0);
  }
}

TEST(ShadowDirectoryTest, APrefixHitWithoutRowsIsCounted) {
  DirectoryBench b(16, 64, 64);
  ASSERT_TRUE(b.step({{pages_of(0, 5), 300, 300}}).ok());
  // Hits two full pages (128 tokens) and goes on with one token in a page of its own.
  ASSERT_TRUE(b.step({{{0, 1, 9}, 129, 1}}).ok());
  EXPECT_EQ(b.plan.counters.missing_tokens, 64U);  // 64..127 were never in a tail
  const auto covered = b.covered(0);
  EXPECT_TRUE(covered[0] && covered[15] && !covered[16] && !covered[127] && covered[128]);
}

TEST(ShadowDirectoryTest, ReproducibleModeNeedsNoRowsBeforeThePage) {
  DirectoryBench b(16, 64, 64, true);
  ASSERT_TRUE(b.step({{pages_of(0, 5), 300, 300}}).ok());
  ASSERT_TRUE(b.step({{{0, 1, 9}, 129, 1}}).ok());
  EXPECT_EQ(b.plan.counters.missing_tokens, 0U);
}

TEST(ShadowDirectoryTest, RowsFormatsWithoutRuleNeedNoSlots) {
  for (const Format f : {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows}) {
    DirectoryBench b(0, 0, 0, false, f);
    EXPECT_EQ(min_shadow_slots(b.rule_, 8), 0);
    for (std::int64_t n = 1; n <= 100; ++n) {
      ASSERT_TRUE(b.step({{pages_of(0, 5), n, 1}}).ok());
      EXPECT_EQ(b.plan.counters.missing_tokens + b.plan.counters.refused_groups +
                    b.plan.counters.lost_partial_groups,
                0U);
      EXPECT_TRUE(b.plan.spans.empty());
    }
  }
}

TEST(ShadowDirectoryTest, RejectedDraftsAreRewritten) {
  DirectoryBench b(0, 0, 8);
  ASSERT_TRUE(b.step({{pages_of(0, 3), 126, 126}}).ok());
  ASSERT_TRUE(b.step({{pages_of(0, 3), 131, 5}}).ok());  // crosses a group and a page
  ASSERT_TRUE(b.step({{pages_of(0, 3), 129, 1}}).ok());  // two of five were accepted, one new
  ASSERT_EQ(b.plan.writes.size(), 1U);
  EXPECT_EQ(b.plan.writes[0].page, 2);
  EXPECT_EQ(b.plan.writes[0].first_row, 0);
  EXPECT_FALSE(b.plan.writes[0].prefix_in_slot);
  // None accepted: back into the group before, which left the tail but kept its rows.
  ASSERT_TRUE(b.step({{pages_of(0, 3), 131, 5}}).ok());
  ASSERT_TRUE(b.step({{pages_of(0, 3), 127, 1}}).ok());
  EXPECT_EQ(b.plan.counters.lost_partial_groups, 0U);
  EXPECT_TRUE(b.plan.writes[0].prefix_in_slot);
  const auto covered = b.covered(0);
  EXPECT_TRUE(covered[126]);
}

TEST(ShadowDirectoryTest, RandomChunksCoverTheSamePositions) {
  std::mt19937 engine(11);
  for (const bool reproducible : {false, true}) {
    for (int trial = 0; trial < 30; ++trial) {
      DirectoryBench b(16, 64, 200, reproducible);
      std::int64_t n = 0;
      while (n < 350) {
        const std::int64_t steps[] = {1, 3, 8, 17, 130};
        const std::int64_t query = steps[engine() % 5];
        n += query;
        ASSERT_TRUE(b.step({{pages_of(0, 8), n, query}}).ok());
        EXPECT_EQ(b.plan.counters.missing_tokens, 0U);
        EXPECT_EQ(b.plan.counters.lost_partial_groups, 0U);
        const auto covered = b.covered(0);
        // The new end's tail, and before the chunk the tail of its first query.
        const std::int64_t first = n - query;
        const std::int64_t before = b.rule_.tail_begin(first + 1);
        for (std::int64_t p = 0; p < n; ++p) {
          if (p < 16 || p >= b.rule_.tail_begin(n) || (p >= before && p < first)) {
            ASSERT_TRUE(covered[static_cast<std::size_t>(p)]);
          } else if (p < before) {
            ASSERT_FALSE(covered[static_cast<std::size_t>(p)]);
          }
        }
      }
    }
  }
}

TEST(ShadowDirectoryTest, DroppedPagesMayBeNegative) {
  DirectoryBench b(16, 64, 16);
  ASSERT_TRUE(b.step({{pages_of(0, 4), 200, 200}}).ok());
  ASSERT_TRUE(b.step({{{-1, -7, 2, 3}, 201, 1}}).ok());
  EXPECT_EQ(b.plan.requests[0].pages[0], -1);
  EXPECT_EQ(b.plan.requests[0].pages[1], -1);
  EXPECT_EQ(b.plan.counters.missing_tokens, 0U);
}

TEST(ShadowDirectoryTest, ForgetDropsAPage) {
  DirectoryBench b(16, 64, 16);
  ASSERT_TRUE(b.step({{pages_of(0, 4), 100, 100}}).ok());
  const std::int32_t used = b.directory->used_slots();
  b.directory->forget(0);
  b.directory->forget(1000);
  for (int g = 0; g < 4; ++g) EXPECT_EQ(b.directory->find(0, g), -1);
  EXPECT_LT(b.directory->used_slots(), used);
}

}  // namespace
}  // namespace bitdecoding
