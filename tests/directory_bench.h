// SPDX-License-Identifier: Apache-2.0
// A shadow directory and the step's tables that drive it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "bitdecoding/page.h"

namespace bitdecoding {

struct Row {
  std::vector<std::int32_t> pages;
  std::int64_t length = 0;  // after the step
  std::int64_t query = 0;
  std::int64_t skip = 0;  // first query rows with slot -1
};

class DirectoryBench {
 public:
  DirectoryBench(int sink, int tail, std::int32_t slots, bool reproducible = false,
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

inline std::vector<std::int32_t> pages_of(int first, int n) {
  std::vector<std::int32_t> out;
  for (int i = 0; i < n; ++i) out.push_back(first + i);
  return out;
}

}  // namespace bitdecoding
