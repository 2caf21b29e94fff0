// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "bitdecoding/page.h"

namespace bitdecoding {

std::int64_t ShadowRule::tail_begin(std::int64_t n) const {
  if (tail_tokens < 0 || n <= 0) return std::max<std::int64_t>(n, 0);
  std::int64_t begin = std::max<std::int64_t>(n - tail_tokens, 0) / group_tokens * group_tokens;
  if (reproducible) begin = std::max(begin, (n - 1) / page_size * page_size);
  return begin;
}

ShadowRule make_shadow_rule(const PageGeometry& geometry, int sink_tokens, int tail_tokens,
                            bool reproducible) {
  ShadowRule rule;
  rule.sink_tokens = sink_tokens;
  rule.tail_tokens = tail_tokens == 0 && !is_tiled(geometry.format) ? -1 : tail_tokens;
  rule.group_tokens = geometry.group_tokens;
  rule.reproducible = reproducible;
  rule.page_size = geometry.page_size;
  return rule;
}

std::int32_t min_shadow_slots(const ShadowRule& rule, int max_requests) {
  const std::int64_t sinks = (rule.sink_tokens + rule.group_tokens - 1) / rule.group_tokens;
  const std::int64_t others = rule.tail_tokens < 0 ? 0 : 2;
  return static_cast<std::int32_t>(std::min<std::int64_t>(
      (sinks + others) * max_requests, std::numeric_limits<std::int32_t>::max()));
}

}  // namespace bitdecoding
