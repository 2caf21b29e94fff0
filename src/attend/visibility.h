// SPDX-License-Identifier: Apache-2.0
// Which positions a query sees and where each is read from (attend.h states the rule). Backends
// walk the segments; nothing else decides a source.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bitdecoding/attend.h"
#include "bitdecoding/page.h"

namespace bitdecoding {

enum class Source : std::uint8_t {
  kPage,          // codes
  kShadow,        // BF16 rows of a slot
  kChunk,         // rows of this step's key and value as they came
  kChunkRounded,  // the same rows, rounded to BF16 as a slot would hold them
};

// Positions [begin, end) that one query reads from one source.
struct Segment {
  std::int64_t begin = 0, end = 0;
  Source source = Source::kPage;
  std::int32_t slot = -1;      // kShadow
  std::int32_t slot_row = 0;   // kShadow: row of the slot that holds `begin`
  std::int64_t token_row = 0;  // kChunk, kChunkRounded: row of key and value that holds `begin`
};

// Position of query row i; negative when the request has more rows than tokens (such a row sees
// nothing).
inline std::int64_t query_position(const RequestPlan& r, std::int64_t i) {
  return r.seq_len - r.query_len + i;
}

// First position that a query at q sees; the last is q itself.
inline std::int64_t visible_begin(std::int64_t q, int window_left) {
  return window_left < 0 ? 0 : std::max<std::int64_t>(q - window_left, 0);
}

inline bool is_prefill(const RequestPlan& r) { return r.query_len > kMaxDecodeQueries; }

// Segments of the query at position q, ascending, together exactly [visible_begin, q + 1).
void visible_segments(const ShadowRule& rule, const RequestPlan& request, std::int64_t q,
                      int window_left, std::vector<Segment>* segments);

}  // namespace bitdecoding
