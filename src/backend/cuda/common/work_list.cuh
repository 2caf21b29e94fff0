// SPDX-License-Identifier: Apache-2.0
// The flat list of units that a step is: shares of blocks, rows, and the copies that a warp needs.
#pragma once

#include <cstdint>

#include "common/decode_traits.cuh"

namespace bitdecoding::cuda {

// The request that holds place u of the list, by a whole warp: 32 places are looked at together, so
// that the search costs one memory latency for each factor of 32.
__device__ inline int find_request(const PlanView& p, std::int32_t u) {
  const int lane = threadIdx.x & 31;
  int low = 0;
  int count = p.num_requests;
  while (count > 1) {
    const int stride = (count + 31) / 32;
    const int at = low + lane * stride;
    const bool before = lane * stride < count && p.prefix[at] <= u;
    low += (31 - __clz(static_cast<int>(__ballot_sync(0xFFFFFFFFU, before) | 1U))) * stride;
    count = min(stride, p.num_requests - low);
  }
  return low;
}

// Row `index` of a request.
__device__ inline ListRow make_row(const DecodeArgs& a, std::int32_t index, int request,
                                   const Request& r) {
  ListRow row;
  const int blocks = row_blocks(r.query_len, a.group, a.plan.columns);
  row.request = request;
  row.head = blocks == 1 ? index : divide(index, blocks);
  row.block = index - row.head * blocks;
  row.of = r;
  row.tile = first_tile(r, a.window_left);
  return row;
}

// The row that holds unit u of a request whose units begin at `base`.
__device__ inline ListRow row_at(const DecodeArgs& a, std::int32_t u, int request, const Request& r,
                                 std::int32_t base) {
  const int n = units_of(r, a.window_left);
  const std::int32_t index = divide(u - base, n);
  ListRow row = make_row(a, index, request, r);
  row.begin = base + index * n;
  row.end = row.begin + n;
  return row;
}

// The row that holds unit u < prefix[num_requests], in `request` or after it. Inlined: with calls
// in a kernel the compiler keeps registers where they are.
__device__ __forceinline__ ListRow find_row(const DecodeArgs& a, std::int32_t u, int request) {
  while (a.plan.prefix[request + 1] <= u) ++request;
  return row_at(a, u, request, a.plan.requests[request], a.plan.prefix[request]);
}

// What a lane looks at to find its block's share: a request, where its work begins, the length of
// the list and how it is shared. Loaded at once, before anything else.
struct PlanHead {
  std::int32_t size, most, prefix;
  Request request;
};

__device__ inline PlanHead load_head(const PlanView& p) {
  const int mine = min(static_cast<int>(threadIdx.x & 31), p.num_requests - 1);
  return {p.prefix[p.num_requests], p.prefix[p.num_requests + 1], p.prefix[mine], p.requests[mine]};
}

// The block's share: units [begin, end) of `row`'s count, which goes on in further rows for runs.
struct Start {
  std::int32_t begin = 0, end = 0;
  ListRow row;
};

// Part `place` of the list, which is in this request, whose parts begin at `base`.
__device__ inline Start part_at(const DecodeArgs& a, std::int32_t place, std::int32_t most,
                                int request, const Request& r, std::int32_t base) {
  const int n = units_of(r, a.window_left);
  const int parts = parts_of_row(n, most);
  const std::int32_t index = divide(place - base, parts);
  const std::int32_t part = place - base - index * parts;
  Start start;
  start.row = make_row(a, index, request, r);
  start.row.end = n;
  start.row.first_block = place - part;
  start.row.num_blocks = parts;
  const Shares shares(n, parts);
  start.begin = shares.begin(part);
  start.end = shares.begin(part + 1);
  return start;
}

// By a whole warp. With up to 32 requests nothing more is loaded.
__device__ inline Start find_start(const DecodeArgs& a, const PlanHead& head,
                                   const Shares& shares) {
  const PlanView& p = a.plan;
  const auto block = static_cast<std::int32_t>(blockIdx.x);
  const bool by_parts = head.most > 0;
  const std::int32_t place = by_parts ? block : shares.begin(block);
  Start start;
  if (place >= (by_parts ? head.size : shares.begin(block + 1))) return start;
  int request;
  Request r;
  std::int32_t base;
  if (p.num_requests > 32) {
    request = find_request(p, place);
    while (p.prefix[request + 1] <= place) ++request;
    r = p.requests[request];
    base = p.prefix[request];
  } else {
    // The last request that begins at or before the place; empty ones before it begin there, too.
    const unsigned before = __ballot_sync(0xFFFFFFFFU, head.prefix <= place);
    request = min(31 - __clz(static_cast<int>(before)), p.num_requests - 1);
    r.seq_len = __shfl_sync(0xFFFFFFFFU, head.request.seq_len, request);
    r.query_begin = __shfl_sync(0xFFFFFFFFU, head.request.query_begin, request);
    r.query_len = __shfl_sync(0xFFFFFFFFU, head.request.query_len, request);
    r.num_units = __shfl_sync(0xFFFFFFFFU, head.request.num_units, request);
    base = __shfl_sync(0xFFFFFFFFU, head.prefix, request);
  }
  if (by_parts) return part_at(a, place, head.most, request, r, base);
  start.row = row_at(a, place, request, r, base);
  start.begin = place;
  start.end = shares.begin(block + 1);
  return start;
}

// The blocks that have parts of a row.
struct RowBlocks {
  std::int32_t first, count;
};
__device__ inline RowBlocks blocks_of(const ListRow& row, const Shares& shares) {
  if (row.num_blocks > 0) return {row.first_block, row.num_blocks};
  const std::int32_t first = shares.of(row.begin);
  return {first, shares.of(row.end - 1) - first + 1};
}

// The copies that one warp needs, in turn: of each of its units K, then V.
template <class T>
class Producer {
 public:
  struct Copy {
    const std::uint8_t* from;
    int bytes;
    bool unreadable;  // a page outside the pool: another is copied in its stead, and masked
  };

  __device__ Producer(const DecodeArgs& a, const ListRow& row, std::int32_t first, std::int32_t end)
      : a_(a), row_(row), unit_(first), end_(end) {
    if (unit_ < end_) look_up();
  }

  __device__ bool done() const { return unit_ >= end_; }

  __device__ Copy next() {
    if (!value_) {
      resolve();
      value_ = true;
      return {source_, shadow_ ? T::kRowBytes : T::kKeyBytes, unreadable_};
    }
    const Copy copy{source_ + (shadow_ ? a_.group_tokens * T::kHeadDim * 2 : T::kKeyBytes),
                    shadow_ ? T::kRowBytes : T::kValueBytes, unreadable_};
    value_ = false;
    unit_ += T::kWarps;
    if (unit_ < end_) look_up();
    return copy;
  }

 private:
  // Starts the loads that say where the unit is; resolve() uses them one copy later.
  __device__ void look_up() {
    if (unit_ >= row_.end) row_ = find_row(a_, unit_, row_.request);
    const int i = unit_ - row_.begin;
    shadow_ = i < row_.of.num_units;
    if (shadow_) {
      const ShadowUnit& u =
          a_.plan.units[static_cast<std::int64_t>(row_.request) * a_.plan.unit_stride + i];
      slot_ = u.slot;
      offset_ = u.row / kUnitRows * kUnitRows;
      return;
    }
    const int tile = row_.tile + i - row_.of.num_units;
    const int page =
        a_.plan.tiles_per_page == 1
            ? tile
            : static_cast<int>(__umulhi(static_cast<unsigned>(tile), a_.plan.page_reciprocal));
    offset_ = tile - page * a_.plan.tiles_per_page;
    slot_ =
        page < a_.plan.page_stride ? a_.plan.pages[row_.request * a_.plan.page_stride + page] : -1;
  }

  __device__ void resolve() {
    unreadable_ = false;
    if (shadow_) {
      const std::int64_t head =
          (static_cast<std::int64_t>(slot_) * a_.num_kv_heads + row_.head) * 2 * a_.group_tokens;
      source_ =
          reinterpret_cast<const std::uint8_t*>(a_.shadow) + (head + offset_) * T::kHeadDim * 2;
      return;
    }
    int page = slot_;
    if (page < 0 || page >= a_.plan.num_pages) {
      page = 0;
      unreadable_ = true;
      atomicAdd(a_.plan.bad_pages, 1ULL);
    }
    source_ = a_.pages + page * a_.stride_page + row_.head * a_.stride_head +
              static_cast<std::int64_t>(offset_) * T::kParts.bytes;
  }

  const DecodeArgs& a_;
  ListRow row_;
  std::int32_t unit_, end_;
  const std::uint8_t* source_ = nullptr;
  std::int32_t slot_ = 0, offset_ = 0;
  bool shadow_ = false, value_ = false, unreadable_ = false;
};

}  // namespace bitdecoding::cuda
