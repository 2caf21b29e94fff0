// SPDX-License-Identifier: Apache-2.0
#include "attend/visibility.h"

namespace bitdecoding {
namespace {

// Walks the visible range of one query from left to right.
class Walk {
 public:
  Walk(const ShadowRule& rule, const RequestPlan& request, std::int64_t q)
      : rule_(rule),
        request_(request),
        chunk_begin_(request.seq_len - request.query_len),
        tail_begin_(rule.tail_begin(q + 1)) {}

  // The longest segment that begins at p and does not pass `end`.
  Segment next(std::int64_t p, std::int64_t end) {
    const bool in_chunk = p >= chunk_begin_;
    if (!in_chunk) end = std::min(end, chunk_begin_);
    if (rule_.reproducible) {
      const bool sink = p < rule_.sink_tokens;
      const bool tail = p >= tail_begin_;
      if (sink && !tail) end = std::min<std::int64_t>(end, rule_.sink_tokens);
      if (!tail) end = std::min(end, std::max(tail_begin_, p + 1));
      if (!sink && !tail) return {p, end, Source::kPage};
      if (in_chunk) return chunk(p, end, Source::kChunkRounded);
    } else if (in_chunk && is_prefill(request_)) {
      return chunk(p, end, Source::kChunk);
    }
    return cached(p, end);
  }

 private:
  Segment chunk(std::int64_t p, std::int64_t end, Source source) const {
    return {p, end, source, -1, 0, request_.query_begin + (p - chunk_begin_)};
  }

  Segment cached(std::int64_t p, std::int64_t end) {
    while (span_ < request_.num_spans && request_.spans[span_].end <= p) ++span_;
    if (span_ == request_.num_spans) return {p, end, Source::kPage};
    const ShadowSpan& span = request_.spans[span_];
    if (p < span.begin) return {p, std::min(end, span.begin), Source::kPage};
    return {p, std::min(end, span.end), Source::kShadow, span.slot,
            span.row + static_cast<std::int32_t>(p - span.begin)};
  }

  const ShadowRule& rule_;
  const RequestPlan& request_;
  const std::int64_t chunk_begin_;
  const std::int64_t tail_begin_;
  std::int64_t span_ = 0;
};

}  // namespace

void visible_segments(const ShadowRule& rule, const RequestPlan& request, std::int64_t q,
                      int window_left, std::vector<Segment>* segments) {
  segments->clear();
  if (q < 0) return;
  Walk walk(rule, request, q);
  for (std::int64_t p = visible_begin(q, window_left); p < q + 1;) {
    segments->push_back(walk.next(p, q + 1));
    p = segments->back().end;
  }
}

}  // namespace bitdecoding
