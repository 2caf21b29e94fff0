// SPDX-License-Identifier: Apache-2.0
// Which positions a query row sees, and from which source: the masks of one 64-token tile.
#pragma once

#include <cstdint>
#include <vector>

#include "bitdecoding/attend.h"

namespace bitdecoding::cpu {

// Bits of positions [low, high) inside the tile that begins at `base`.
constexpr std::uint64_t range_mask(std::int64_t base, std::int64_t low, std::int64_t high) {
  const std::int64_t a = low - base;
  const std::int64_t b = high - base;
  if (b <= 0 || a >= kTileTokens || b <= a) return 0;
  const std::uint64_t below_high =
      b >= kTileTokens ? ~std::uint64_t{0} : (std::uint64_t{1} << b) - 1;
  return a <= 0 ? below_high : below_high & ~((std::uint64_t{1} << a) - 1);
}

// One request as the rows of one KV head see it. Row r is query token r / group_size, query head
// r % group_size of the KV head's group.
class RequestRows {
 public:
  RequestRows(const AttendParams& params, const RequestPlan& request);

  int group_size() const { return group_size_; }
  std::int64_t num_rows() const { return request_->query_len * group_size_; }
  const RequestPlan& request() const { return *request_; }
  // The chunk's own rows are read from key/value: prefill, or any reproducible request.
  bool reads_chunk() const { return reads_chunk_; }
  std::int64_t chunk_begin() const { return request_->seq_len - request_->query_len; }

  // Tiles that hold a position some row of query tokens [first, last] may see: [begin, end).
  std::int64_t first_tile(std::int64_t first_token) const;
  std::int64_t end_tile(std::int64_t last_token) const;

  // Positions of the tile that exist in BF16 (or, in prefill, in the chunk's own precision).
  std::uint64_t available(std::int64_t tile) const;
  // Those that query token `token` reads from there, and those it reads from the page.
  std::uint64_t bf16_mask(std::int64_t token, std::int64_t tile, std::uint64_t available) const;
  std::uint64_t page_mask(std::int64_t token, std::int64_t tile, std::uint64_t available) const;

 private:
  std::uint64_t visible(std::int64_t token, std::int64_t base) const;

  const RequestPlan* request_;
  const ShadowRule* rule_;
  int group_size_;
  int window_left_;
  bool reads_chunk_;
};

}  // namespace bitdecoding::cpu
