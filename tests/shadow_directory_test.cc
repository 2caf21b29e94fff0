// The directory's rules, driven through StepInput alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "bitdecoding/page.h"

namespace bitdecoding {
namespace {

struct Row {
  std::vector<std::int32_t> pages;
  std::int64_t length = 0;  // after the step
  std::int64_t query = 0;
  std::int64_t skip = 0;  // first query rows with slot -1
};

class Bench {
 public:
  Bench(int sink, int tail, std::int32_t slots, bool reproducible = false,
        Format format = Format::kNvfp4, int page_size = 64, std::int64_t pages = 64)
      : geometry_(PageGeometry::make(format, FragmentOrder::kQuad, 64, page_size).take()),
        pages_(pages) {
    rule_ = make_shadow_rule(geometry_, sink, tail, reproducible);
    directory = ShadowDirectory::make(geometry_, rule_, {pages, slots, 16}).take();
  }

  Status step(const std::vector<Row>& rows) {
    table_.clear();
    starts_ = {0};
    lengths_.clear();
    slots_.clear();
    for (const Row& r : rows) {
      std::vector<std::int32_t> entries = r.pages;
      entries.resize(16, std::numeric_limits<std::int32_t>::min());
      table_.insert(table_.end(), entries.begin(), entries.end());
      for (std::int64_t i = 0; i < r.query; ++i) {
        const std::int64_t p = r.length - r.query + i;
        const std::int64_t page =
            p < 0 ? -1 : r.pages[static_cast<std::size_t>(p / geometry_.page_size)];
        slots_.push_back(
            i < r.skip || page < 0 ? -1 : page * geometry_.page_size + p % geometry_.page_size);
      }
      starts_.push_back(static_cast<std::int32_t>(slots_.size()));
      lengths_.push_back(static_cast<std::int32_t>(r.length));
    }
    return build();
  }

  Status build() { return directory->build(input(), &plan); }

  StepInput input() {
    StepInput in;
    in.num_requests = static_cast<int>(lengths_.size());
    in.block_table = table_.data();
    in.block_table_stride = 16;
    in.query_start = starts_.data();
    in.seq_lens = lengths_.data();
    in.slot_mapping = slots_.data();
    in.num_tokens = static_cast<std::int64_t>(slots_.size());
    in.num_pages = pages_;
    return in;
  }

  // Positions of request r that the plan's spans cover.
  std::vector<bool> covered(std::size_t r) const {
    const RequestPlan& request = plan.requests[r];
    std::vector<bool> out(static_cast<std::size_t>(request.seq_len));
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < request.num_spans; ++i) {
      const ShadowSpan& s = request.spans[i];
      EXPECT_GE(s.begin, last);
      EXPECT_LT(s.begin, s.end);
      EXPECT_LE(s.end, request.seq_len);
      EXPECT_EQ(s.begin / rule_.group_tokens, (s.end - 1) / rule_.group_tokens);
      EXPECT_EQ(s.row, s.begin % rule_.group_tokens);
      last = s.end;
      for (std::int64_t p = s.begin; p < s.end; ++p) out[static_cast<std::size_t>(p)] = true;
    }
    return out;
  }

  StepPlan plan;
  std::unique_ptr<ShadowDirectory> directory;
  PageGeometry geometry_;
  ShadowRule rule_;
  std::int64_t pages_;
  std::vector<std::int32_t> table_, starts_, lengths_;
  std::vector<std::int64_t> slots_;
};

std::vector<std::int32_t> pages_of(int first, int n) {
  std::vector<std::int32_t> out;
  for (int i = 0; i < n; ++i) out.push_back(first + i);
  return out;
}

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
      Bench b(sink, tail, 64);
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
  Bench b(16, 64, 8, false, Format::kNvfp4, 64, 128);
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
    Bench b(16, 64, 16);
    ASSERT_TRUE(b.step({{pages_of(0, 2), n, n}}).ok());
    const auto covered = b.covered(0);
    EXPECT_EQ(std::count(covered.begin(), covered.end(), true), n);
  }
}

TEST(ShadowDirectoryTest, AGroupEnteredInItsMiddleKeepsItsSlotWhenItCompletes) {
  Bench b(0, 0, 4);
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
  Bench b(16, 64, 64);
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
  Bench b(16, 64, 64);
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
  Bench b(16, 64, 64);
  ASSERT_TRUE(b.step({{pages_of(0, 5), 300, 300}}).ok());
  // Hits two full pages (128 tokens) and goes on with one token in a page of its own.
  ASSERT_TRUE(b.step({{{0, 1, 9}, 129, 1}}).ok());
  EXPECT_EQ(b.plan.counters.missing_tokens, 64U);  // 64..127 were never in a tail
  const auto covered = b.covered(0);
  EXPECT_TRUE(covered[0] && covered[15] && !covered[16] && !covered[127] && covered[128]);
}

TEST(ShadowDirectoryTest, ReproducibleModeNeedsNoRowsBeforeThePage) {
  Bench b(16, 64, 64, true);
  ASSERT_TRUE(b.step({{pages_of(0, 5), 300, 300}}).ok());
  ASSERT_TRUE(b.step({{{0, 1, 9}, 129, 1}}).ok());
  EXPECT_EQ(b.plan.counters.missing_tokens, 0U);
}

TEST(ShadowDirectoryTest, AStarvedPoolDropsTailsFirstAndCountsAll) {
  Bench b(16, 64, 3);
  std::uint64_t refused = 0;
  for (std::int64_t n = 1; n <= 300; ++n) {
    ASSERT_TRUE(b.step({{pages_of(0, 5), n, 1}}).ok());
    EXPECT_EQ(b.plan.counters.lost_partial_groups, 0U) << n;
    EXPECT_GE(b.directory->find(0, 0), 0) << "the sink goes last";
    const auto covered = b.covered(0);
    const auto got = std::count(covered.begin(), covered.end(), true);
    std::int64_t asked = 0;
    for (std::int64_t p = 0; p < n; ++p) asked += p < 16 || p >= b.rule_.tail_begin(n) ? 1 : 0;
    EXPECT_EQ(static_cast<std::int64_t>(b.plan.counters.missing_tokens), asked - got);
    refused += b.plan.counters.refused_groups;
  }
  EXPECT_EQ(refused, 0U);  // tails were dropped, never the group that was being written
  EXPECT_GT(b.directory->totals().evicted_slots, 0U);
  EXPECT_GT(b.directory->totals().missing_tokens, 0U);

  Bench none(16, 64, 0);
  for (std::int64_t n = 1; n <= 40; ++n) {
    ASSERT_TRUE(none.step({{pages_of(0, 5), n, 1}}).ok());
    EXPECT_EQ(none.plan.counters.missing_tokens, static_cast<std::uint64_t>(n));
    EXPECT_EQ(none.plan.counters.lost_partial_groups, n % 16 == 1 ? 0U : 1U);
    EXPECT_EQ(none.plan.counters.refused_groups, 1U);
    EXPECT_EQ(none.plan.writes[0].slot, -1);
  }
}

TEST(ShadowDirectoryTest, RowsFormatsWithoutRuleNeedNoSlots) {
  for (const Format f : {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows}) {
    Bench b(0, 0, 0, false, f);
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

TEST(ShadowDirectoryTest, MinimumSlotsAreEnoughForDecode) {
  for (const int requests : {1, 3, 8}) {
    Bench b(16, 64, 0);
    const std::int32_t floor = min_shadow_slots(b.rule_, requests);
    b.directory = ShadowDirectory::make(b.geometry_, b.rule_, {64, floor, requests}).take();
    for (std::int64_t n = 1; n <= 200; ++n) {
      std::vector<Row> rows;
      for (int r = 0; r < requests; ++r) rows.push_back({pages_of(8 * r, 4), n, 1});
      ASSERT_TRUE(b.step(rows).ok());
      EXPECT_EQ(b.plan.counters.lost_partial_groups, 0U);
      EXPECT_EQ(b.plan.counters.refused_groups, 0U);
      for (int r = 0; r < requests; ++r) EXPECT_GE(b.directory->find(8 * r, 0), 0);
    }
  }
}

TEST(ShadowDirectoryTest, RejectedDraftsAreRewritten) {
  Bench b(0, 0, 8);
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
      Bench b(16, 64, 200, reproducible);
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

TEST(ShadowDirectoryTest, PaddingAndEmptyRequests) {
  Bench b(16, 64, 8);
  ASSERT_TRUE(b.step({{pages_of(0, 2), 5, 5}, {{}, 0, 0}, {pages_of(4, 2), 70, 0}}).ok());
  EXPECT_EQ(b.plan.requests.size(), 3U);
  EXPECT_EQ(b.plan.writes.size(), 1U);
  // More query rows than tokens: the rows before the first token have no position.
  ASSERT_TRUE(b.step({{pages_of(0, 2), 1, 4, 3}}).ok());
  EXPECT_EQ(b.plan.writes.size(), 1U);
  EXPECT_EQ(b.plan.writes[0].source, 3);
  ASSERT_TRUE(b.step({}).ok());
  EXPECT_TRUE(b.plan.requests.empty());
}

TEST(ShadowDirectoryTest, SkippedRowsAreNotWritten) {
  Bench b(16, 64, 8);
  ASSERT_TRUE(b.step({{pages_of(0, 2), 5, 5}}).ok());
  b.slots_ = {5, -1, -1, 8, 9};
  b.starts_ = {0, 1, 3, 5};
  b.lengths_ = {6, 80, 10};
  b.table_.resize(48);
  const std::vector<std::int32_t> two = {6, 7};
  std::copy(two.begin(), two.end(), b.table_.begin() + 16);
  b.table_[32] = 0;
  // Request 2 continues page 0 where request 0 stops: two writes into one group.
  EXPECT_EQ(b.build().code(), StatusCode::kInvalidArgument);
  b.table_[32] = 9;
  b.slots_ = {5, -1, -1, 9 * 64 + 8, 9 * 64 + 9};
  ASSERT_TRUE(b.build().ok());
  ASSERT_EQ(b.plan.writes.size(), 2U);
  EXPECT_EQ(b.plan.writes[0].page, 0);
  EXPECT_EQ(b.plan.writes[1].page, 9);
  EXPECT_EQ(b.plan.writes[1].source, 3);
}

TEST(ShadowDirectoryTest, BadInputIsRefusedAndChangesNothing) {
  Bench b(16, 64, 8);
  ASSERT_TRUE(b.step({{pages_of(0, 2), 70, 70}}).ok());
  const std::int32_t used = b.directory->used_slots();
  auto expect = [&](StatusCode code, auto change) {
    ASSERT_TRUE(b.step({{pages_of(0, 2), 71, 1}}).ok());
    const std::vector<std::int32_t> table = b.table_;
    change();
    StepPlan plan;
    const Status status = b.directory->build(b.input(), &plan);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_FALSE(status.message().empty());
    EXPECT_TRUE(plan.requests.empty() && plan.writes.empty());
    EXPECT_EQ(b.directory->used_slots(), used);
  };
  const StatusCode range = StatusCode::kOutOfRange;
  const StatusCode bad = StatusCode::kInvalidArgument;
  expect(range, [&] { b.table_[0] = 64; });
  expect(range, [&] { b.table_[1] = std::numeric_limits<std::int32_t>::max(); });
  expect(bad, [&] { b.table_[1] = -1; });  // the slot says otherwise
  expect(range, [&] { b.lengths_[0] = -1; });
  expect(range, [&] { b.lengths_[0] = 64 * 16 + 1; });
  expect(range, [&] { b.starts_[1] = 2; });
  expect(range, [&] { b.starts_[0] = -1; });
  expect(range, [&] { b.starts_ = {1, 0}; });
  expect(bad, [&] { b.slots_[0] = 5; });
  expect(range, [&] { b.slots_[0] = 64 * 64; });
  expect(range, [&] { b.slots_[0] = std::numeric_limits<std::int64_t>::max(); });
  expect(bad, [&] { b.slots_.push_back(3); });  // a padding row with a slot
  expect(range, [&] { b.pages_ = 65; });
  b.pages_ = 64;
  EXPECT_EQ(b.directory->build(b.input(), nullptr).code(), bad);
  StepInput in = b.input();
  in.slot_mapping = nullptr;
  EXPECT_EQ(b.directory->build(in, &b.plan).code(), bad);
  in = b.input();
  in.block_table = nullptr;
  EXPECT_EQ(b.directory->build(in, &b.plan).code(), bad);
  in = b.input();
  in.num_requests = 17;
  EXPECT_EQ(b.directory->build(in, &b.plan).code(), range);
}

TEST(ShadowDirectoryTest, DroppedPagesMayBeNegative) {
  Bench b(16, 64, 16);
  ASSERT_TRUE(b.step({{pages_of(0, 4), 200, 200}}).ok());
  ASSERT_TRUE(b.step({{{-1, -7, 2, 3}, 201, 1}}).ok());
  EXPECT_EQ(b.plan.requests[0].pages[0], -1);
  EXPECT_EQ(b.plan.requests[0].pages[1], -1);
  EXPECT_EQ(b.plan.counters.missing_tokens, 0U);
}

TEST(ShadowDirectoryTest, ForgetDropsAPage) {
  Bench b(16, 64, 16);
  ASSERT_TRUE(b.step({{pages_of(0, 4), 100, 100}}).ok());
  const std::int32_t used = b.directory->used_slots();
  b.directory->forget(0);
  b.directory->forget(1000);
  for (int g = 0; g < 4; ++g) EXPECT_EQ(b.directory->find(0, g), -1);
  EXPECT_LT(b.directory->used_slots(), used);
}

TEST(ShadowDirectoryTest, MakeChecksItsArguments) {
  const PageGeometry g = PageGeometry::make(Format::kNvfp4, FragmentOrder::kQuad, 64, 128).take();
  const ShadowRule rule = make_shadow_rule(g, 16, 64, false);
  EXPECT_FALSE(ShadowDirectory::make(g, rule, {0, 1, 1}).ok());
  EXPECT_FALSE(ShadowDirectory::make(g, rule, {1, -1, 1}).ok());
  EXPECT_FALSE(ShadowDirectory::make(g, rule, {1, 1, 0}).ok());
  ShadowRule other = rule;
  other.page_size = 64;
  EXPECT_FALSE(ShadowDirectory::make(g, other, {1, 1, 1}).ok());
  other = rule;
  other.sink_tokens = -1;
  EXPECT_FALSE(ShadowDirectory::make(g, other, {1, 1, 1}).ok());
  other = rule;
  other.tail_tokens = -1;
  EXPECT_FALSE(ShadowDirectory::make(g, other, {1, 1, 1}).ok());
  EXPECT_TRUE(ShadowDirectory::make(g, rule, {1, 1, 1}).ok());
}

}  // namespace
}  // namespace bitdecoding
