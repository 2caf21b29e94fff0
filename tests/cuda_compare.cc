// SPDX-License-Identifier: Apache-2.0
#include "cuda_compare.h"

#include <cmath>

namespace bitdecoding::test {
namespace {

const char* planner_name(Planner planner) {
  switch (planner) {
    case Planner::kHost:
      return "host plan";
    case Planner::kDevice:
      return "device plan";
    case Planner::kGraph:
      return "graph";
  }
  return "";
}

void make_sequences(const CudaCase& c, World* w) {
  set_masks(*w, c.masks);
  w->add_sequence({7, 3, 11, 1, 20, 9, 8, 2});
  w->add_sequence({30, 31, 5, 6, 12, 13, 14, 15});
}

void run_steps(const CudaCase& c, World* want, World* got) {
  std::uint32_t next = 0;
  for (const std::int64_t n : c.chunks) {
    const std::vector<Work> work = {{0, iota_tokens(next, n)},
                                    {1, iota_tokens(next + 7000, n / 2 + 1)}};
    next += static_cast<std::uint32_t>(n);
    const StepResult a = want->step(work);
    const StepResult b = got->step(work);
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    ASSERT_TRUE(b.status.ok()) << b.status.message();
    for (std::int64_t page = 0; page < c.options.num_pages; ++page) {
      ASSERT_EQ(want->page_bytes(page), got->page_bytes(page))
          << "page " << page << " after " << next;
    }
    expect_decoded_rows(*got, b, a, c.limits);
    if (testing::Test::HasFatalFailure()) return;
  }
}

void expect_counters(const World& want, const World& got, const CudaCounters& counters,
                     bool host_plan) {
  EXPECT_EQ(want.counters.non_finite, got.counters.non_finite);
  EXPECT_EQ(want.counters.flushed_blocks, got.counters.flushed_blocks);
  EXPECT_EQ(want.counters.saturated_blocks, got.counters.saturated_blocks);
  EXPECT_EQ(counters.bad_pages, 0U);
  EXPECT_EQ(counters.bad_slots, 0U);
  EXPECT_EQ(counters.bad_lengths, 0U);
  if (host_plan) return;
  const StepCounters host = want.directory->totals();
  EXPECT_EQ(counters.step.refused_groups, host.refused_groups);
  EXPECT_EQ(counters.step.missing_tokens, host.missing_tokens);
  EXPECT_EQ(counters.step.lost_partial_groups, host.lost_partial_groups);
}

}  // namespace

void expect_decoded_rows(const World& w, const StepResult& got, const StepResult& want,
                         const Limits& limits) {
  for (std::size_t r = 0; r < w.plan.requests.size(); ++r) {
    const RequestPlan& request = w.plan.requests[r];
    if (request.query_len > kMaxDecodeQueries) continue;
    const auto heads = static_cast<std::size_t>(w.options.num_q_heads);
    const std::size_t first = static_cast<std::size_t>(request.query_begin) * heads;
    const std::size_t last =
        static_cast<std::size_t>(request.query_begin + request.query_len) * heads;
    const auto dims = static_cast<std::size_t>(w.options.head_dim);
    const double error = relative_error(got.output, want.output, first * dims, last * dims);
    ASSERT_TRUE(error <= limits.output)
        << "request " << r << " of " << request.seq_len << " tokens, " << request.query_len
        << " rows: error " << error;
    for (std::size_t i = first; i < last; ++i) {
      ASSERT_TRUE(std::fabs(got.lse[i] - want.lse[i]) <= limits.lse)
          << "lse " << got.lse[i] << " instead of " << want.lse[i];
    }
  }
}

void compare_steps(const CudaCase& given) {
  CudaCase c = given;
  c.options.order = FragmentOrder::kFp16Mma;
  for (const Planner planner : c.planners) {
    SCOPED_TRACE(testing::Message()
                 << format_name(c.options.format) << " head_dim " << c.options.head_dim << " heads "
                 << c.options.num_q_heads << "/" << c.options.num_kv_heads << " page "
                 << c.options.page_size << " window " << c.masks.window_left << " softcap "
                 << c.masks.softcap << " " << planner_name(planner));
    World want(c.options);
    World got(c.options);
    for (World* w : {&want, &got}) make_sequences(c, w);
    auto* cuda = new CudaHostBackend(&got, planner);
    got.backend.reset(cuda);
    if (testing::Test::HasFatalFailure()) return;
    run_steps(c, &want, &got);
    if (testing::Test::HasFatalFailure()) return;
    expect_counters(want, got, cuda->counters(), planner == Planner::kHost);
  }
}

}  // namespace bitdecoding::test
