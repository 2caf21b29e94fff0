// SPDX-License-Identifier: Apache-2.0
// Pages: their geometry, exchange, and the plan of one engine step (which tokens are written
// where, which 16-token groups also exist in BF16). Plans are shared by all layers of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bitdecoding/format.h"
#include "bitdecoding/status.h"

#pragma GCC visibility push(default)
namespace bitdecoding {

// Sizes of one page and KV head. All members are derived by make(); plain data, copy freely.
struct PageGeometry {
  Format format = Format::kNvfp4;
  FragmentOrder order = FragmentOrder::kQuad;
  int head_dim = 0;
  int page_size = 0;      // tokens, a multiple of 64
  int group_tokens = 16;  // tokens of a shadow group
  int groups_per_page = 0;
  std::int64_t tile_bytes = 0;  // 64 tokens of one head, K and V (all formats)
  std::int64_t head_bytes = 0;  // one head of one page: page_size / 64 tiles
  double bytes_per_token = 0;   // one head

  // kInvalidArgument with the supported values unless head_dim is in kHeadDims and page_size is a
  // multiple of 64 in 64..1024.
  static Result<PageGeometry> make(Format format, FragmentOrder order, int head_dim, int page_size);
};

// Re-orders one head of one page between fragment orders; in and out are head_bytes long and must
// not overlap. Formats that are not tiled are copied. A bijection: there and back gives the same
// bytes.
Status convert_fragment_order(const PageGeometry& geometry, FragmentOrder from, FragmentOrder to,
                              std::span<const std::uint8_t> in, std::span<std::uint8_t> out);

// Writes FormatTag and all heads of one page in `kFp4Mma` order. `heads` holds one pointer per KV
// head to head_bytes bytes in geometry.order.
Result<std::vector<std::uint8_t>> export_page(const PageGeometry& geometry,
                                              std::span<const std::uint8_t* const> heads,
                                              int first_kv_head);
// The reverse. kCorrupt for a bad tag or length, kUnsupported for another version, and
// kInvalidArgument when the tag does not describe `geometry`; nothing is written then. A 0x7F
// scale byte is kCorrupt too.
Status import_page(const PageGeometry& geometry, std::span<const std::uint8_t> bytes,
                   std::span<std::uint8_t* const> heads, int first_kv_head);
Result<FormatTag> read_format_tag(std::span<const std::uint8_t> bytes);

// ---- one engine step -------------------------------------------------------------------------

// The BF16 rule, a function of the sequence length n alone. A position p of a sequence of n
// tokens is BF16 when p < sink_tokens or p >= tail_begin(n). A step reads the tail of its first
// query (n = position + 1) and keeps the one of the sequence's new end.
struct ShadowRule {
  int sink_tokens = 16;
  int tail_tokens = 64;  // 0 = only the incomplete group; negative = no tail at all
  int group_tokens = 16;
  bool reproducible = false;
  int page_size = 128;

  // group * floor((n - tail_tokens) / group), never below 0; in reproducible mode also not before
  // the page that holds the last token (position n - 1). n itself when there is no tail.
  std::int64_t tail_begin(std::int64_t n) const;
};

// The rule of a recipe's sink_tokens, tail_tokens and reproducible for pages of `geometry`. Row
// formats have no incomplete groups to keep, so tail_tokens = 0 means no tail there (and with
// sink_tokens = 0 no shadow slot is ever needed).
ShadowRule make_shadow_rule(const PageGeometry& geometry, int sink_tokens, int tail_tokens,
                            bool reproducible);

// What the engine hands over; pointers are borrowed until build() returns. Host memory.
struct StepInput {
  int num_requests = 0;
  const std::int32_t* block_table = nullptr;   // [num_requests][block_table_stride]
  std::int64_t block_table_stride = 0;         // elements
  const std::int32_t* query_start = nullptr;   // [num_requests + 1], rows of the step's tensors
  const std::int32_t* seq_lens = nullptr;      // [num_requests], tokens after this step
  const std::int64_t* slot_mapping = nullptr;  // [num_tokens]; page * page_size + row; < 0 = skip
  std::int64_t num_tokens = 0;
  std::int64_t num_pages = 0;  // pages of the pool: bounds for every entry
};

// Consecutive rows of the step's K and V that fall into one group of one page.
struct GroupWrite {
  std::int64_t page = 0;
  std::int32_t group = 0;      // within the page
  std::int32_t first_row = 0;  // first row of the group that is written now
  std::int32_t num_rows = 0;
  std::int64_t source = 0;  // row of key/value that holds first_row
  std::int32_t slot = -1;   // shadow slot that gets the BF16 rows, or -1
  // Rows before first_row: from the slot when true; when false and first_row > 0 they are read
  // back from the page's own codes (less accurate, counted).
  bool prefix_in_slot = false;
};

// A run of positions that exist in BF16: within one group.
struct ShadowSpan {
  std::int64_t begin = 0;  // positions [begin, end)
  std::int64_t end = 0;
  std::int32_t slot = 0;
  std::int32_t row = 0;  // row of the slot's group that holds `begin`
};

struct RequestPlan {
  std::int64_t seq_len = 0;
  std::int64_t query_begin = 0;  // first row in query/key/value
  std::int64_t query_len = 0;
  const std::int32_t* pages = nullptr;  // into StepPlan::page_ids
  std::int64_t num_pages = 0;
  const ShadowSpan* spans = nullptr;  // into StepPlan::spans, ascending
  std::int64_t num_spans = 0;
};

struct StepCounters {
  std::uint64_t evicted_slots = 0;        // a live entry dropped for want of slots
  std::uint64_t refused_groups = 0;       // a group the rule asked for got no slot
  std::uint64_t missing_tokens = 0;       // positions the rule asks for that will be read as FP4
  std::uint64_t lost_partial_groups = 0;  // a group entered in its middle without its BF16 rows
};

// RequestPlan points into the vectors here: move a plan, do not copy it.
struct StepPlan {
  ShadowRule rule;
  std::vector<std::int32_t> page_ids;
  std::vector<ShadowSpan> spans;
  std::vector<GroupWrite> writes;
  std::vector<RequestPlan> requests;
  std::int64_t num_tokens = 0;
  StepCounters counters;  // of this step
};

// Maps (page, group) to a BF16 slot for all layers; one a worker process. Not thread-safe.
// Keyed by physical page, so it needs no word of requests, preemption or prefix hits.
class ShadowDirectory {
 public:
  struct Limits {
    std::int64_t num_pages = 0;
    std::int32_t num_slots = 0;
    int max_requests = 0;
  };
  static Result<std::unique_ptr<ShadowDirectory>> make(const PageGeometry& geometry,
                                                       const ShadowRule& rule,
                                                       const Limits& limits);
  virtual ~ShadowDirectory() = default;

  // Checks every entry of `input` (kOutOfRange names the request and the value), then updates the
  // directory and fills `plan`, reusing its memory. On an error the directory is unchanged.
  virtual Status build(const StepInput& input, StepPlan* plan) = 0;

  // Drops every entry of a page whose codes were replaced from outside (an imported page).
  virtual void forget(std::int64_t page) = 0;

  virtual StepCounters totals() const = 0;
  virtual std::int32_t used_slots() const = 0;
  // Slot of a group or -1; for tests and `inspect`.
  virtual std::int32_t find(std::int64_t page, std::int32_t group) const = 0;
};

// Slots that max_requests rows need at the least: their sink groups, one partial group each, and
// one group that was entered in its middle. 0 for a rule without sink and tail.
std::int32_t min_shadow_slots(const ShadowRule& rule, int max_requests);

// Bytes of one slot of one layer: K and V, BF16.
constexpr std::int64_t shadow_slot_bytes(int num_kv_heads, int group_tokens, int head_dim) {
  return std::int64_t{2} * num_kv_heads * group_tokens * head_dim * 2;
}

}  // namespace bitdecoding
#pragma GCC visibility pop
