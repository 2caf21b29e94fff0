// SPDX-License-Identifier: Apache-2.0
// The directory with too few slots, with padding and with bad input.
#include <algorithm>

#include "directory_bench.h"

namespace bitdecoding {
namespace {

TEST(ShadowDirectoryLimitsTest, AStarvedPoolDropsTailsFirstAndCountsAll) {
  DirectoryBench b(16, 64, 3);
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

  DirectoryBench none(16, 64, 0);
  for (std::int64_t n = 1; n <= 40; ++n) {
    ASSERT_TRUE(none.step({{pages_of(0, 5), n, 1}}).ok());
    EXPECT_EQ(none.plan.counters.missing_tokens, static_cast<std::uint64_t>(n));
    EXPECT_EQ(none.plan.counters.lost_partial_groups, n % 16 == 1 ? 0U : 1U);
    EXPECT_EQ(none.plan.counters.refused_groups, 1U);
    EXPECT_EQ(none.plan.writes[0].slot, -1);
  }
}

TEST(ShadowDirectoryLimitsTest, MinimumSlotsAreEnoughForDecode) {
  for (const int requests : {1, 3, 8}) {
    DirectoryBench b(16, 64, 0);
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

TEST(ShadowDirectoryLimitsTest, PaddingAndEmptyRequests) {
  DirectoryBench b(16, 64, 8);
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

TEST(ShadowDirectoryLimitsTest, SkippedRowsAreNotWritten) {
  DirectoryBench b(16, 64, 8);
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

TEST(ShadowDirectoryLimitsTest, BadInputIsRefusedAndChangesNothing) {
  DirectoryBench b(16, 64, 8);
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

TEST(ShadowDirectoryLimitsTest, MakeChecksItsArguments) {
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
