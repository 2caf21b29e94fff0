// SPDX-License-Identifier: Apache-2.0
// Rows of one KV head of one request, read from their source in double precision.
#pragma once

#include <cstdint>
#include <vector>

#include "attend/visibility.h"
#include "bitdecoding/attend.h"

namespace bitdecoding::reference {

class HeadRows {
 public:
  HeadRows(const AttendParams& params, const RequestPlan& request, int kv_head);

  // head_dim values of a position that is stored in a page: K shifted and rotated, V. Decoded on
  // first use, so that rows nobody sees are never touched.
  const float* page_key(std::int64_t position) { return page_row(position, 0); }
  const float* page_value(std::int64_t position) { return page_row(position, 1); }

  // head_dim values of a position of a BF16 segment, in the original space.
  void bf16_row(const Segment& segment, std::int64_t position, int side, double* out) const;

  std::uint64_t corrupt_scales() const { return corrupt_; }

 private:
  const float* page_row(std::int64_t position, int side);

  const AttendParams& params_;
  const RequestPlan& request_;
  const int kv_head_;
  std::vector<float> rows_;         // [position][side][head_dim]
  std::vector<std::uint8_t> done_;  // [position]
  std::uint64_t corrupt_ = 0;
};

}  // namespace bitdecoding::reference
