// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/rows.h"

#include <algorithm>

namespace bitdecoding::cpu {

RequestRows::RequestRows(const AttendParams& params, const RequestPlan& request)
    : request_(&request),
      rule_(&params.plan->rule),
      group_size_(params.layer->num_q_heads / params.layer->num_kv_heads),
      window_left_(params.window_left),
      reads_chunk_(rule_->reproducible || request.query_len > kMaxDecodeQueries) {}

std::int64_t RequestRows::first_tile(std::int64_t first_token) const {
  if (window_left_ < 0) return 0;
  return std::max<std::int64_t>(0, chunk_begin() + first_token - window_left_) / kTileTokens;
}

std::int64_t RequestRows::end_tile(std::int64_t last_token) const {
  return (chunk_begin() + last_token) / kTileTokens + 1;
}

std::uint64_t RequestRows::visible(std::int64_t token, std::int64_t base) const {
  const std::int64_t position = chunk_begin() + token;
  const std::int64_t low = window_left_ < 0 ? 0 : position - window_left_;
  return range_mask(base, low, position + 1);
}

std::uint64_t RequestRows::available(std::int64_t tile) const {
  const std::int64_t base = tile * kTileTokens;
  std::uint64_t mask = reads_chunk_ ? range_mask(base, chunk_begin(), request_->seq_len) : 0;
  for (std::int64_t i = 0; i < request_->num_spans; ++i) {
    mask |= range_mask(base, request_->spans[i].begin, request_->spans[i].end);
  }
  return mask;
}

std::uint64_t RequestRows::bf16_mask(std::int64_t token, std::int64_t tile,
                                     std::uint64_t available) const {
  if (available == 0) return 0;
  const std::int64_t base = tile * kTileTokens;
  std::uint64_t mask = visible(token, base) & available;
  if (rule_->reproducible) {
    const std::int64_t n = chunk_begin() + token + 1;
    mask &= range_mask(base, 0, rule_->sink_tokens) | range_mask(base, rule_->tail_begin(n), n);
  }
  return mask;
}

std::uint64_t RequestRows::page_mask(std::int64_t token, std::int64_t tile,
                                     std::uint64_t available) const {
  return visible(token, tile * kTileTokens) & ~bf16_mask(token, tile, available);
}

}  // namespace bitdecoding::cpu
