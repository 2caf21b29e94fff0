// SPDX-License-Identifier: Apache-2.0
// The flat list of units that a step is: shares of blocks, rows, and the copies that a warp needs.
#pragma once

#include <cstdint>

#include "common/decode_traits.cuh"

namespace bitdecoding::cuda {

// One row of the list: a request, KV head and block of query rows.
struct ListRow {
  std::int32_t begin = 0, end = 0;  // units in the list
  std::int32_t request = 0, head = 0, block = 0;
  std::int32_t num_units = 0;  // shadow units
  std::int32_t tile = 0;       // first tile
};

// Shares of the list that differ by at most one unit, in 32-bit arithmetic.
struct Shares {
  std::int32_t base = 0, rest = 0;

  Shares() = default;
  __device__ Shares(std::int32_t units, std::int32_t blocks)
      : base(units / blocks), rest(units - base * blocks) {}
  __device__ std::int32_t begin(std::int32_t block) const {
    return block * base + min(block, rest);
  }
  // The block whose share holds unit u. Only blocks without work follow the last one that has some.
  __device__ std::int32_t of(std::int32_t u) const {
    const std::int32_t large = rest * (base + 1);
    return u < large ? u / (base + 1) : rest + (u - large) / base;
  }
};

// The request that holds unit u, by a whole warp: 32 places are looked at together, so that the
// search costs one memory latency for each factor of 32.
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

__device__ inline ListRow make_row(const DecodeArgs& a, std::int32_t u, int request,
                                   const Request& r, std::int32_t base) {
  ListRow row;
  const int n = units_of(r, a.window_left);
  const std::int32_t index = (u - base) / n;
  const int blocks = row_blocks(r.query_len, a.group, a.plan.columns);
  row.begin = base + index * n;
  row.end = row.begin + n;
  row.request = request;
  row.head = blocks == 1 ? index : index / blocks;
  row.block = index - row.head * blocks;
  row.num_units = r.num_units;
  row.tile = first_tile(r, a.window_left);
  return row;
}

// The row that holds unit u < prefix[num_requests], in `request` or after it. Inlined: with calls
// in a kernel the compiler keeps registers where they are.
__device__ __forceinline__ ListRow find_row(const DecodeArgs& a, std::int32_t u, int request) {
  while (a.plan.prefix[request + 1] <= u) ++request;
  return make_row(a, u, request, a.plan.requests[request], a.plan.prefix[request]);
}

// The block's share of the list and the row it begins with, by a whole warp. With up to 32 requests
// all loads are under way at once.
struct Start {
  std::int32_t begin, end;
  ListRow row;
};

__device__ inline Start find_start(const DecodeArgs& a, Shares* shares) {
  const int lane = threadIdx.x & 31;
  const PlanView& p = a.plan;
  const int mine = min(lane, p.num_requests - 1);
  const std::int32_t prefix = p.prefix[mine];
  const Request request = p.requests[mine];
  *shares = Shares(p.prefix[p.num_requests], static_cast<int>(gridDim.x));
  Start start;
  start.begin = shares->begin(static_cast<int>(blockIdx.x));
  start.end = shares->begin(static_cast<int>(blockIdx.x) + 1);
  if (start.begin >= start.end) return start;
  if (p.num_requests > 32) {
    start.row = find_row(a, start.begin, find_request(p, start.begin));
    return start;
  }
  // The last request that begins at or before the share; empty ones before it begin there, too.
  const unsigned before = __ballot_sync(0xFFFFFFFFU, prefix <= start.begin);
  const int at = min(31 - __clz(static_cast<int>(before)), p.num_requests - 1);
  Request r;
  r.seq_len = __shfl_sync(0xFFFFFFFFU, request.seq_len, at);
  r.query_begin = __shfl_sync(0xFFFFFFFFU, request.query_begin, at);
  r.query_len = __shfl_sync(0xFFFFFFFFU, request.query_len, at);
  r.num_units = __shfl_sync(0xFFFFFFFFU, request.num_units, at);
  start.row = make_row(a, start.begin, at, r, __shfl_sync(0xFFFFFFFFU, prefix, at));
  return start;
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
    shadow_ = i < row_.num_units;
    if (shadow_) {
      const ShadowUnit& u =
          a_.plan.units[static_cast<std::int64_t>(row_.request) * a_.plan.unit_stride + i];
      slot_ = u.slot;
      offset_ = u.row / kUnitRows * kUnitRows;
      return;
    }
    const int tile = row_.tile + i - row_.num_units;
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
