// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/attend.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "backend/cpu/attend_fp4.h"
#include "backend/cpu/attend_matrix.h"
#include "backend/cpu/attend_scratch.h"
#include "backend/cpu/corrupt_tile.h"
#include "backend/cpu/query.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/tile_source.h"
#include "backend/cpu/value_shift.h"

namespace bitdecoding::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Buffers of one thread; they grow to the largest block seen and stay.
struct ThreadScratch {
  FloatTileBuffer tile;
  QuadQuery quads;
  std::vector<float> query;
  std::vector<float> merged;
  AlignedBuffer<float> partial;
  std::vector<std::uint64_t> masks;
};

ThreadScratch& thread_scratch() {
  thread_local ThreadScratch scratch;
  return scratch;
}

class AttendCall {
 public:
  AttendCall(const AttendParams& params, const AttendKernels& kernels, AttendScratch& scratch)
      : params_(params),
        kernels_(kernels),
        scratch_(scratch),
        head_dim_(params.layer->geometry.head_dim) {}

  void run_item(std::int64_t index);
  Status status() const { return failed_.load() ? failure_ : Status(); }

 private:
  void pages_integer(const AttendItem& item, const AttendGroup& group, const RequestRows& rows,
                     const TileSource& source, const PartialView& partial);
  // What the passes of an item over the same tiles have found: invalid scale bytes.
  struct TileCheck {
    int corrupt = -1;  // -1 = not looked at yet
    bool counted = false;
  };
  using TileChecks = std::array<TileCheck, kSplitTiles>;
  void integer_pass(const AttendItem& item, const AttendGroup& group, const RequestRows& rows,
                    const TileSource& source, const PartialView& partial, int first, int count,
                    TileChecks* checks);
  DecodeContext decode_context(const AttendGroup& group) const;
  int corrupt_scales(const DecodeContext& context, const RequestRows& rows,
                     const TileSource& source, std::int64_t tile);
  void corrupt_pass(const TileSource& source, std::int64_t tile, const std::uint64_t* masks,
                    int count, const DecodeState& state, TileCheck* check);
  void float_tiles(const AttendItem& item, const AttendGroup& group, const RequestRows& rows,
                   const TileSource& source, const PartialView& partial);
  // `last` is the partial result of the item that finished last.
  void merge(const AttendGroup& group, const RequestRows& rows, const PartialView& last);
  void store_single(const AttendGroup& group, const RequestRows& rows, const PartialView& part);
  void store_result(const RequestRows& rows, std::int64_t row, int head, const float* out,
                    float weight, float max, float sum);
  void fail(const AttendGroup& group, std::int64_t tile);

  const AttendParams& params_;
  const AttendKernels& kernels_;
  AttendScratch& scratch_;
  int head_dim_;
  std::mutex mutex_;
  std::atomic<bool> failed_{false};
  Status failure_;
};

void AttendCall::fail(const AttendGroup& group, std::int64_t tile) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load()) return;
  failure_ = Status(StatusCode::kOutOfRange,
                    fmt::format("request {}: position {} is visible, but the block table has no "
                                "page of the cache for it; "
                                "pages must be in 0..{}",
                                group.request, tile * kTileTokens, params_.cache.num_pages - 1));
  failed_.store(true);
}

void AttendCall::run_item(std::int64_t index) {
  const AttendItem& item = scratch_.items[index];
  const AttendGroup& group = scratch_.groups[item.group];
  const RequestRows rows(params_, params_.plan->requests[group.request]);
  const TileSource source(params_, kernels_, rows, group.kv_head);
  float* own = nullptr;
  if (item.state < 0) {
    own = thread_scratch().partial.reserve(
        static_cast<std::size_t>(AttendScratch::partial_floats(group.capacity, head_dim_)));
  }
  const PartialView partial = scratch_.partial(item, head_dim_, own);
  std::fill_n(partial.max, group.capacity, -kInfinity);
  std::fill_n(partial.sum, group.capacity, 0.0F);
  std::fill_n(partial.out, static_cast<std::int64_t>(group.capacity) * head_dim_, 0.0F);
  switch (item.kind) {
    case ItemKind::kPagesInteger:
      pages_integer(item, group, rows, source, partial);
      break;
    case ItemKind::kPagesFp4: {
      const std::int64_t missing =
          attend_pages_fp4(params_, kernels_, rows, source, group, item, partial);
      if (missing >= 0) fail(group, missing);
      break;
    }
    case ItemKind::kMatrix: {
      const std::int64_t missing =
          attend_matrix(params_, kernels_, rows, source, group, item, partial);
      if (missing >= 0) fail(group, missing);
      break;
    }
    case ItemKind::kPagesFloat:
    case ItemKind::kBf16:
      float_tiles(item, group, rows, source, partial);
      break;
  }
  const bool pages_alone = item.kind != ItemKind::kMatrix && item.kind != ItemKind::kBf16;
  if (pages_alone) add_value_shift(*params_.layer, group.kv_head, group.rows, partial);
  // The last item of the group merges; acquire pairs with the releases of the others.
  if (scratch_.pending[item.group].fetch_sub(1, std::memory_order_acq_rel) == 1)
    merge(group, rows, partial);
}

// ---- codes as integers ----

void AttendCall::pages_integer(const AttendItem& item, const AttendGroup& group,
                               const RequestRows& rows, const TileSource& source,
                               const PartialView& partial) {
  const int per_pass =
      kernels_.decode->max_work / (params_.arithmetic == Arithmetic::kWide ? 2 : 1);
  TileChecks checks;
  for (int first = 0; first < group.rows; first += per_pass) {
    integer_pass(item, group, rows, source, partial, first, std::min(per_pass, group.rows - first),
                 &checks);
  }
}

// Invalid scale bytes of a tile's tokens.
int AttendCall::corrupt_scales(const DecodeContext& context, const RequestRows& rows,
                               const TileSource& source, std::int64_t tile) {
  const int found = kernels_.decode->count_nan_scales(context, source.page_tile(tile));
  // Bytes past the sequence may be anything: there the tile is read again, token by token.
  if (found == 0 || (tile + 1) * kTileTokens <= rows.request().seq_len) return found;
  return source.load_page_tile(tile, TileSpace::kOriginal, &thread_scratch().tile);
}

// The rows of integer_pass over a corrupt tile, in floats.
void AttendCall::corrupt_pass(const TileSource& source, std::int64_t tile,
                              const std::uint64_t* masks, int count, const DecodeState& state,
                              TileCheck* check) {
  ThreadScratch& scratch = thread_scratch();
  source.load_page_tile(tile, TileSpace::kOriginal, &scratch.tile);
  FloatState floats;
  floats.query = scratch.query.data();
  floats.max = state.max;
  floats.sum = state.sum;
  floats.out = state.out;
  floats.rows = count;
  floats.head_dim = head_dim_;
  floats.softcap = params_.softcap;
  const bool seen = attend_corrupt_tile(*kernels_.tile, &scratch.tile, masks, floats);
  if (!seen || check->counted) return;
  check->counted = true;
  count_corrupt(params_, check->corrupt);
}

DecodeContext AttendCall::decode_context(const AttendGroup& group) const {
  const LayerConfig& layer = *params_.layer;
  const bool mx = layer.geometry.format == Format::kMxfp4;
  DecodeContext context;
  context.format = layer.geometry.format;
  context.head_dim = head_dim_;
  context.softcap = params_.softcap;
  context.value_unit =
      0.5F * (mx ? 1.0F : 256.0F) *
      (layer.value_outer == nullptr ? 1.0F : std::ldexp(1.0F, layer.value_outer[group.kv_head]));
  return context;
}

void AttendCall::integer_pass(const AttendItem& item, const AttendGroup& group,
                              const RequestRows& rows, const TileSource& source,
                              const PartialView& partial, int first, int count,
                              TileChecks* checks) {
  ThreadScratch& scratch = thread_scratch();
  scratch.query.resize(static_cast<std::size_t>(kMaxWork) * head_dim_);
  load_query_rows(params_, rows.request(), group.kv_head, group.first_row + first, count,
                  params_.sm_scale, scratch.query.data());
  scratch.quads.prepare(*params_.layer, group.kv_head, scratch.query.data(), count,
                        params_.arithmetic == Arithmetic::kWide ? 2 : 1);
  scratch.quads.widen(*kernels_.decode, head_dim_);
  const DecodeContext context = decode_context(group);
  const DecodeState state{partial.max + first, partial.sum + first,
                          partial.out + static_cast<std::int64_t>(first) * head_dim_};
  for (std::int64_t tile = item.tile_begin;
       tile < item.tile_end && !failed_.load(std::memory_order_relaxed); ++tile) {
    const std::uint64_t available = rows.available(tile);
    DecodeTile work;
    std::uint64_t any = 0;
    std::uint64_t all = ~std::uint64_t{0};
    for (int r = 0; r < count; ++r) {
      const std::int64_t token = (group.first_row + first + r) / rows.group_size();
      work.mask[r] = rows.page_mask(token, tile, available);
      any |= work.mask[r];
      all &= work.mask[r];
    }
    if (any == 0) continue;
    work.full = all == ~std::uint64_t{0};
    work.tile = source.page_tile(tile);
    if (work.tile == nullptr) return fail(group, tile);
    TileCheck& check = (*checks)[static_cast<std::size_t>(tile - item.tile_begin)];
    if (check.corrupt < 0) check.corrupt = corrupt_scales(context, rows, source, tile);
    if (check.corrupt > 0) {
      corrupt_pass(source, tile, work.mask, count, state, &check);
      continue;
    }
    work.prefetch = tile + 1 < item.tile_end ? source.page_tile(tile + 1) : nullptr;
    kernels_.decode->tile(context, scratch.quads.query(), work, state);
  }
}

// ---- float tiles: dequantized pages, or BF16 rows ----

void AttendCall::float_tiles(const AttendItem& item, const AttendGroup& group,
                             const RequestRows& rows, const TileSource& source,
                             const PartialView& partial) {
  ThreadScratch& scratch = thread_scratch();
  scratch.query.resize(static_cast<std::size_t>(group.rows) * head_dim_);
  scratch.masks.resize(group.rows);
  load_query_rows(params_, rows.request(), group.kv_head, group.first_row, group.rows,
                  params_.sm_scale, scratch.query.data());
  FloatState state;
  state.query = scratch.query.data();
  state.max = partial.max;
  state.sum = partial.sum;
  state.out = partial.out;
  state.rows = group.rows;
  state.head_dim = head_dim_;
  state.softcap = params_.softcap;
  const bool pages = item.kind == ItemKind::kPagesFloat;
  for (std::int64_t tile = item.tile_begin;
       tile < item.tile_end && !failed_.load(std::memory_order_relaxed); ++tile) {
    const std::uint64_t available = rows.available(tile);
    if (!pages && available == 0) continue;
    std::uint64_t any = 0;
    for (int r = 0; r < group.rows; ++r) {
      const std::int64_t token = (group.first_row + r) / rows.group_size();
      const std::uint64_t mask =
          pages ? rows.page_mask(token, tile, available) : rows.bf16_mask(token, tile, available);
      scratch.masks[r] = mask;
      any |= mask;
    }
    if (any == 0) continue;
    int corrupt = 0;
    if (pages) {
      if (source.page_tile(tile) == nullptr) return fail(group, tile);
      corrupt = source.load_page_tile(tile, TileSpace::kOriginal, &scratch.tile);
      clear_unseen_values(any, head_dim_, &scratch.tile);
    } else {
      source.load_bf16_tile(tile, available, &scratch.tile);
    }
    if (corrupt == 0) {
      kernels_.tile->tile({scratch.tile.key, scratch.tile.value, scratch.masks.data()}, state);
    } else if (attend_corrupt_tile(*kernels_.tile, &scratch.tile, scratch.masks.data(), state)) {
      count_corrupt(params_, corrupt);
    }
  }
}

// ---- merge ----

// The same as merge for one item, without the copy.
void AttendCall::store_single(const AttendGroup& group, const RequestRows& rows,
                              const PartialView& part) {
  for (int r = 0; r < group.rows; ++r) {
    const std::int64_t row = group.first_row + r;
    const int head = group.kv_head * rows.group_size() + static_cast<int>(row % rows.group_size());
    const float sink = params_.attn_sink == nullptr ? -kInfinity : params_.attn_sink[head];
    const float max = std::max(part.max[r], sink);
    const float weight = max == -kInfinity ? 0.0F : std::exp(part.max[r] - max);
    const float sum = max == -kInfinity ? 0.0F : part.sum[r] * weight + std::exp(sink - max);
    store_result(rows, row, head, part.out + static_cast<std::int64_t>(r) * head_dim_, weight, max,
                 sum);
  }
}

void AttendCall::merge(const AttendGroup& group, const RequestRows& rows, const PartialView& last) {
  if (group.num_items == 1) return store_single(group, rows, last);
  ThreadScratch& scratch = thread_scratch();
  scratch.merged.resize(head_dim_);
  for (int r = 0; r < group.rows; ++r) {
    const std::int64_t row = group.first_row + r;
    const int head = group.kv_head * rows.group_size() + static_cast<int>(row % rows.group_size());
    float max = params_.attn_sink == nullptr ? -kInfinity : params_.attn_sink[head];
    for (int i = 0; i < group.num_items; ++i) {
      max = std::max(
          max, scratch_.partial(scratch_.items[group.first_item + i], head_dim_, nullptr).max[r]);
    }
    float sum = params_.attn_sink == nullptr || max == -kInfinity
                    ? 0.0F
                    : std::exp(params_.attn_sink[head] - max);
    std::fill(scratch.merged.begin(), scratch.merged.end(), 0.0F);
    for (int i = 0; i < group.num_items; ++i) {
      const PartialView part =
          scratch_.partial(scratch_.items[group.first_item + i], head_dim_, nullptr);
      if (part.max[r] == -kInfinity) continue;
      const float weight = std::exp(part.max[r] - max);
      sum += weight * part.sum[r];
      const float* in = part.out + static_cast<std::int64_t>(r) * head_dim_;
      for (int d = 0; d < head_dim_; ++d) scratch.merged[d] += weight * in[d];
    }
    store_result(rows, row, head, scratch.merged.data(), 1.0F, max, sum);
  }
}

// A query that is not finite must show: integer arithmetic and maxima would make a number of it. A
// row before the sequence's first token is empty, whatever a learned sink would add.
void AttendCall::store_result(const RequestRows& rows, std::int64_t row, int head, const float* out,
                              float weight, float max, float sum) {
  const std::int64_t token = row / rows.group_size();
  const std::int64_t tensor_row = rows.request().query_begin + token;
  const bool sees = rows.chunk_begin() + token >= 0;
  const bool empty = sum == 0.0F || !sees;
  float scale = empty ? 0.0F : weight / sum;
  float lse = empty ? -kInfinity : max + std::log(sum);
  if (sees && !row_is_finite(params_.query, tensor_row, head, head_dim_)) {
    scale = lse = std::numeric_limits<float>::quiet_NaN();
  }
  store_row(params_, tensor_row, head, out, scale);
  if (params_.lse != nullptr) params_.lse[tensor_row * params_.layer->num_q_heads + head] = lse;
}

}  // namespace

AttendScratchPool::AttendScratchPool() = default;
AttendScratchPool::~AttendScratchPool() = default;

std::unique_ptr<AttendScratch> AttendScratchPool::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return std::make_unique<AttendScratch>();
  std::unique_ptr<AttendScratch> scratch = std::move(free_.back());
  free_.pop_back();
  return scratch;
}

void AttendScratchPool::give(std::unique_ptr<AttendScratch> scratch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(scratch));
}

Status cpu_attend(const AttendParams& params, const AttendKernels& kernels,
                  const ParallelFor& parallel, AttendScratchPool& pool) {
  std::unique_ptr<AttendScratch> scratch = pool.take();
  scratch->divide(params, kernels.matrix != nullptr);
  AttendCall call(params, kernels, *scratch);
  parallel(static_cast<std::int64_t>(scratch->items.size()),
           [&call](std::int64_t item, int) { call.run_item(item); });
  pool.give(std::move(scratch));
  return call.status();
}

}  // namespace bitdecoding::cpu
