// SPDX-License-Identifier: Apache-2.0
// The directory's rules, in the order in which a step needs them:
//   1. touch and pin what the step reads: sinks, tails, groups entered in their middle;
//   2. drop entries that a write makes stale (written from row 0 and not to be shadowed: pages are
//      recycled without notice);
//   3. give slots to written groups: incomplete groups first, then sinks, then tails, newest first;
//   4. state in every write where its earlier rows are, and in every request which positions exist
//      in BF16.
#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "bitdecoding/attend.h"
#include "bitdecoding/page.h"
#include "page/shadow_slots.h"
#include "page/step_plan.h"

namespace bitdecoding {
namespace {

struct Range {
  std::int64_t begin, end;
};

class Directory final : public ShadowDirectory {
 public:
  Directory(const PageGeometry& geometry, const ShadowRule& rule, const Limits& limits)
      : rule_(rule),
        tiled_(is_tiled(geometry.format)),
        groups_per_page_(geometry.groups_per_page),
        bounds_{limits.num_pages, limits.max_requests, geometry.page_size, geometry.group_tokens},
        slots_(limits.num_pages * geometry.groups_per_page, limits.num_slots) {}

  Status build(const StepInput& input, StepPlan* plan) override;

  void forget(std::int64_t page) override {
    if (page < 0 || page >= bounds_.num_pages) return;
    for (int group = 0; group < groups_per_page_; ++group) {
      const std::int32_t slot = slots_.find(page * groups_per_page_ + group);
      if (slot >= 0) slots_.erase(slot);
    }
  }
  StepCounters totals() const override { return totals_; }
  std::int32_t used_slots() const override { return slots_.used(); }
  std::int32_t find(std::int64_t page, std::int32_t group) const override {
    if (page < 0 || page >= bounds_.num_pages || group < 0 || group >= groups_per_page_) return -1;
    return slots_.find(page * groups_per_page_ + group);
  }

 private:
  // What the rule says of one write.
  struct Want {
    std::size_t write = 0;
    std::int64_t key = 0;
    std::int64_t distance = 0;  // tokens from the group's start to the sequence's end
    Pin pin = Pin::kNone;       // kNone: no shadow wanted
    bool asked = false;         // by the rule at the step's length
    bool sink = false;
  };

  std::int64_t key_of(const RequestPlan& r, std::int64_t position) const {
    const std::int64_t page = r.pages[position / bounds_.page_size];
    if (page < 0) return -1;
    return page * groups_per_page_ + position % bounds_.page_size / bounds_.group_tokens;
  }
  std::int64_t first_query(const RequestPlan& r) const {
    return std::max<std::int64_t>(r.seq_len - r.query_len, 0);
  }
  // Steps that may be verifying drafts: the next step's length can be smaller.
  bool is_short(const RequestPlan& r) const { return r.query_len <= kMaxDecodeQueries; }
  // Where the tail of a sequence of n tokens begins; r.seq_len when there is none.
  std::int64_t tail_of(const RequestPlan& r, std::int64_t n) const {
    return rule_.tail_tokens < 0 ? r.seq_len : std::min(rule_.tail_begin(n), r.seq_len);
  }
  // The tail of the first query: a chunk's rows see the tokens before the chunk as a decoded row
  // would. (Later queries may see more in BF16 than their own tail, except in reproducible mode.)
  std::int64_t read_tail(const RequestPlan& r) const {
    return tail_of(r, r.query_len > 0 ? first_query(r) + 1 : r.seq_len);
  }
  std::int64_t keep_tail(const RequestPlan& r) const {
    return tail_of(r, is_short(r) ? first_query(r) + 1 : r.seq_len);
  }
  void bf16_ranges(const RequestPlan& r, Range out[2]) const;
  void touch_requests(const StepPlan& plan);
  Want want_of(const StepPlan& plan, std::size_t write) const;
  void collect_wants(const StepPlan& plan);
  void pin_and_drop_written(const StepPlan& plan);
  void give_slots(StepCounters* counters);
  void finish_writes(StepPlan* plan);
  void make_spans(StepPlan* plan);

  const ShadowRule rule_;
  const bool tiled_;
  const int groups_per_page_;
  const StepBounds bounds_;
  ShadowSlots slots_;
  std::uint64_t step_ = 0;
  StepCounters totals_;
  std::vector<std::int32_t> write_request_;
  std::vector<Want> wants_;
  std::vector<std::size_t> order_;
};

// Positions that the step may read as BF16, ascending and disjoint.
void Directory::bf16_ranges(const RequestPlan& r, Range out[2]) const {
  const std::int64_t sink_end = std::min<std::int64_t>(rule_.sink_tokens, r.seq_len);
  out[0] = {0, sink_end};
  out[1] = {std::max(read_tail(r), sink_end), r.seq_len};
}

void Directory::touch_requests(const StepPlan& plan) {
  const std::int64_t group = bounds_.group_tokens;
  // Soft touches come first, so that what is pinned below is newer.
  for (const RequestPlan& r : plan.requests) {
    for (std::int64_t p = keep_tail(r); p < read_tail(r); p += group) {
      const std::int64_t key = key_of(r, p);
      const std::int32_t slot = key < 0 ? -1 : slots_.find(key);
      if (slot >= 0) slots_.touch(slot);
    }
  }
  for (const RequestPlan& r : plan.requests) {
    Range ranges[2];
    bf16_ranges(r, ranges);
    for (const Range& range : ranges) {
      for (std::int64_t p = range.begin / group * group; p < range.end; p += group) {
        const std::int64_t key = key_of(r, p);
        const std::int32_t slot = key < 0 ? -1 : slots_.find(key);
        if (slot < 0) continue;
        const bool sink = p < rule_.sink_tokens;
        slots_.set_sink(slot, sink);
        slots_.pin(slot, step_, sink ? Pin::kSink : Pin::kTail, r.seq_len - p);
      }
    }
  }
}

Directory::Want Directory::want_of(const StepPlan& plan, std::size_t write) const {
  const GroupWrite& w = plan.writes[write];
  const RequestPlan& r = plan.requests[static_cast<std::size_t>(write_request_[write])];
  const std::int64_t position = r.seq_len - r.query_len + (w.source - r.query_begin);
  const std::int64_t begin = position - w.first_row;
  Want want;
  want.write = write;
  want.key = w.page * groups_per_page_ + w.group;
  want.distance = r.seq_len - begin;
  want.sink = begin < rule_.sink_tokens;
  want.asked = want.sink || begin >= tail_of(r, r.seq_len);
  const bool partial = tiled_ && begin + bounds_.group_tokens > r.seq_len;
  if (partial) {
    want.pin = Pin::kPartial;
  } else if (want.sink) {
    want.pin = Pin::kSink;
  } else if (want.asked || begin >= keep_tail(r)) {
    want.pin = Pin::kTail;
  }
  return want;
}

void Directory::collect_wants(const StepPlan& plan) {
  wants_.clear();
  for (std::size_t i = 0; i < plan.writes.size(); ++i) wants_.push_back(want_of(plan, i));
}

void Directory::pin_and_drop_written(const StepPlan& plan) {
  for (const Want& want : wants_) {
    const std::int32_t slot = slots_.find(want.key);
    if (slot < 0) continue;
    if (plan.writes[want.write].first_row > 0) {
      // Its earlier rows are read in this step, by the writer or by the chunk's first queries, even
      // when the group is complete after it.
      slots_.set_sink(slot, want.sink);
      slots_.pin(slot, step_, Pin::kPartial, want.distance);
    } else if (want.pin == Pin::kNone) {
      slots_.erase(slot);
    } else {
      slots_.set_sink(slot, want.sink);
      slots_.pin(slot, step_, want.pin, want.distance);
    }
  }
}

void Directory::give_slots(StepCounters* counters) {
  order_.clear();
  for (std::size_t i = 0; i < wants_.size(); ++i) {
    if (wants_[i].pin != Pin::kNone && slots_.find(wants_[i].key) < 0) order_.push_back(i);
  }
  std::stable_sort(order_.begin(), order_.end(), [this](std::size_t a, std::size_t b) {
    if (wants_[a].pin != wants_[b].pin) return wants_[a].pin > wants_[b].pin;
    return wants_[a].distance < wants_[b].distance;
  });
  for (const std::size_t i : order_) {
    const Want& want = wants_[i];
    const std::int32_t slot = slots_.insert(want.key, step_, want.pin, &counters->evicted_slots);
    if (slot < 0) continue;
    slots_.set_sink(slot, want.sink);
    slots_.pin(slot, step_, want.pin, want.distance);
  }
}

void Directory::finish_writes(StepPlan* plan) {
  for (const Want& want : wants_) {
    GroupWrite& w = plan->writes[want.write];
    w.slot = slots_.find(want.key);
    const std::int32_t end = w.first_row + w.num_rows;
    if (w.slot >= 0) {
      ShadowEntry& e = slots_.entry(w.slot);
      w.prefix_in_slot = w.first_row > 0 && e.valid_begin == 0 && e.valid_end >= w.first_row;
      const bool joins =
          e.valid_begin < e.valid_end && w.first_row >= e.valid_begin && w.first_row <= e.valid_end;
      if (!joins) e.valid_begin = w.first_row;
      e.valid_end = end;  // rows past it are of rejected drafts or of the page's last owner
    } else if (want.asked) {
      ++plan->counters.refused_groups;
    }
    if (tiled_ && w.first_row > 0 && !w.prefix_in_slot) ++plan->counters.lost_partial_groups;
  }
}

void Directory::make_spans(StepPlan* plan) {
  const std::int64_t group = bounds_.group_tokens;
  for (RequestPlan& r : plan->requests) {
    const std::size_t first_span = plan->spans.size();
    const bool chunk_is_read_raw = rule_.reproducible || !is_short(r);
    const std::int64_t from_cache = chunk_is_read_raw ? first_query(r) : r.seq_len;
    Range ranges[2];
    bf16_ranges(r, ranges);
    for (const Range& range : ranges) {
      for (std::int64_t p = range.begin / group * group; p < range.end; p += group) {
        const std::int64_t key = key_of(r, p);
        if (key < 0) continue;
        const std::int64_t begin = std::max(p, range.begin);
        const std::int64_t end = std::min(p + group, range.end);
        std::int64_t missing = std::max<std::int64_t>(std::min(end, from_cache) - begin, 0);
        const std::int32_t slot = slots_.find(key);
        if (slot >= 0) {
          const ShadowEntry& e = slots_.entry(slot);
          const std::int64_t b = std::max(begin, p + e.valid_begin);
          const std::int64_t x = std::min(end, p + e.valid_end);
          if (b < x) {
            plan->spans.push_back({b, x, slot, static_cast<std::int32_t>(b - p)});
            missing -= std::max<std::int64_t>(std::min(x, from_cache) - b, 0);
          }
        }
        plan->counters.missing_tokens += static_cast<std::uint64_t>(missing);
      }
    }
    r.num_spans = static_cast<std::int64_t>(plan->spans.size() - first_span);
  }
  const ShadowSpan* spans = plan->spans.data();
  for (RequestPlan& r : plan->requests) {
    r.spans = spans;
    spans += r.num_spans;
  }
}

void clear(StepPlan* plan) {
  plan->page_ids.clear();
  plan->spans.clear();
  plan->writes.clear();
  plan->requests.clear();
  plan->num_tokens = 0;
  plan->counters = {};
}

Status Directory::build(const StepInput& input, StepPlan* plan) {
  if (plan == nullptr) {
    return {StatusCode::kInvalidArgument, "the plan to fill must not be null"};
  }
  try {
    clear(plan);
    write_request_.clear();
    plan->rule = rule_;
    Status status = lay_out_step(bounds_, input, plan, &write_request_);
    if (!status.ok()) {
      clear(plan);
      return status;
    }
    ++step_;
    touch_requests(*plan);
    collect_wants(*plan);
    pin_and_drop_written(*plan);
    give_slots(&plan->counters);
    finish_writes(plan);
    make_spans(plan);
  } catch (const std::bad_alloc&) {
    clear(plan);
    return {StatusCode::kResourceExhausted, "no memory is left for the plan of this step"};
  }
  totals_.evicted_slots += plan->counters.evicted_slots;
  totals_.refused_groups += plan->counters.refused_groups;
  totals_.missing_tokens += plan->counters.missing_tokens;
  totals_.lost_partial_groups += plan->counters.lost_partial_groups;
  return {};
}

Status check_rule(const PageGeometry& g, const ShadowRule& rule) {
  if (rule.group_tokens != g.group_tokens || rule.page_size != g.page_size) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the BF16 rule is for groups of {} and pages of {} tokens, but the pages "
                        "have {} and {}; make it with make_shadow_rule",
                        rule.group_tokens, rule.page_size, g.group_tokens, g.page_size)};
  }
  if (rule.sink_tokens < 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("sink_tokens is {}; expected 0 (off) or more", rule.sink_tokens)};
  }
  if (rule.tail_tokens < 0 && is_tiled(g.format)) {
    return {StatusCode::kInvalidArgument,
            fmt::format("tail_tokens is {}; {} pages need the BF16 rows of incomplete groups, so "
                        "expected 0 or more",
                        rule.tail_tokens, format_name(g.format))};
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<ShadowDirectory>> ShadowDirectory::make(const PageGeometry& geometry,
                                                               const ShadowRule& asked,
                                                               const Limits& limits) {
  const auto checked =
      PageGeometry::make(geometry.format, geometry.order, geometry.head_dim, geometry.page_size);
  if (!checked.ok()) return checked.status();
  Status status = check_rule(checked.value(), asked);
  if (!status.ok()) return status;
  const ShadowRule rule =
      make_shadow_rule(checked.value(), asked.sink_tokens, asked.tail_tokens, asked.reproducible);
  constexpr std::int64_t kMaxPages = std::int64_t{1} << 31;
  if (limits.num_pages < 1 || limits.num_pages > kMaxPages || limits.num_slots < 0 ||
      limits.max_requests < 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a directory needs 1 to 2^31 pages, 0 or more slots and 1 or more "
                              "requests, but got {} pages, {} slots and {} requests",
                              limits.num_pages, limits.num_slots, limits.max_requests));
  }
  try {
    return std::unique_ptr<ShadowDirectory>(
        std::make_unique<Directory>(checked.value(), rule, limits));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("no memory for a directory of {} pages", limits.num_pages));
  }
}

}  // namespace bitdecoding
