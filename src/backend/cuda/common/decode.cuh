// SPDX-License-Identifier: Apache-2.0
// Decode attention over FP4 tiles and BF16 rows, one launch.
//
// The work of a step is a flat list of units: for each request, KV head and block of query rows,
// first the request's shadow units (sixteen BF16 rows), then its tiles (64 tokens). Every block of
// threads takes an equal share of the list; its warps take units in turn, each through its own ring
// of half units (K, then V), so that memory is always asked for more than is being worked on. At
// the end of a row's share the warps' results are added up; a row shared by several blocks is
// merged by the last of them to arrive.
//
// Tokens are the M side of the MMA and query rows the N side. With layout.h's order of K's rows the
// scores' accumulators, transposed, are the P operand.
//
// Scores are in log2 units. The running maximum is only raised when a score exceeds it by kSlack:
// probabilities then reach 2^kSlack, far inside FP16.
#pragma once

#include <cstdint>

#include "common/dependent.cuh"
#include "common/rows.cuh"

namespace bitdecoding::cuda {

// Registers change hands between the groups of four warps of a block.
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The warp that fills all rings: lane w serves warp w.
template <class T>
__device__ inline void fill_rings(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row,
                                  std::int32_t begin, std::int32_t end) {
  static_assert(T::kWarps <= 32);
  const int lane = threadIdx.x & 31;
  if (lane >= T::kWarps) return;
  BulkSource<typename T::Ring, T::kEntries, Producer<T>> source(
      s.ring[lane], Producer<T>(a, row, begin + lane, end));
  wait_for_predecessor();
  // In step: a warp waits for a load whichever of its lanes asked for it, so that lanes on their
  // own would wait for each other's page numbers. Warps differ by one unit at the most.
  static_assert(T::kEntries >= 2, "a warp that waits at a row's barrier may be a unit behind");
  constexpr unsigned kLanes = 0xFFFFFFFFU >> (32 - T::kWarps);
  while (true) {
    const bool more = !source.done();
    if (!__any_sync(kLanes, more)) return;
    while (more && !source.is_free()) __nanosleep(20);
    __syncwarp(kLanes);
    if (more) source.fill();
  }
}

template <class T>
__device__ inline auto make_feed(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row,
                                 std::int32_t first, std::int32_t end) {
  const int warp = threadIdx.x >> 5;
  if constexpr (T::Ring::kOwnWarp) {
    return BulkFeed<typename T::Ring, T::kEntries>(s.ring[warp]);
  } else {
    return AsyncCopyFeed<typename T::Ring, T::kEntries, Producer<T>>(
        s.ring[warp], Producer<T>(a, row, first, end));
  }
}

// Counts a block's arrival; returns how many came before. What the block's threads wrote before the
// last barrier is seen by whoever counts later.
__device__ inline int arrive(std::int32_t* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) std::uint8_t raw[];
  auto& s = *reinterpret_cast<SharedStorage<T>*>(raw);
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x < T::kWarps) s.ring[threadIdx.x].init();
  let_successor_begin();
  Shares shares;
  const Start start = find_start(a, &shares);
  const std::int32_t begin = start.begin;
  const std::int32_t end = start.end;
  if (begin >= end) {
    wait_for_predecessor();
    return;
  }
  ListRow row = start.row;
  __syncthreads();
  if (warp >= T::kWarps) {
    if constexpr (T::kRegisters > 0) give_registers<kCopyRegisters>();
    if constexpr (T::Ring::kOwnWarp) {
      if (warp == T::kWarps) fill_rings<T>(a, s, row, begin, end);
    }
    return;
  }
  if constexpr (T::kRegisters > 0) take_registers<T::kRegisters>();
  // A feed that copies by itself begins at once.
  if constexpr (!T::Ring::kOwnWarp) wait_for_predecessor();
  auto feed = make_feed<T>(a, s, row, begin + warp, end);

  std::int32_t unit = begin + warp;
  int num_shared = 0;  // rows of this block that other blocks share: at most its first and its last
  ListRow shared[2];
  while (true) {
    WarpRow<T> work(a, s, row);
    wait_for_predecessor();  // until here only the plan was read
    load_queries<T>(a, s, row);
    sync_workers<T>();
    work.take_queries();
    const std::int32_t stop = min(row.end, end);
    for (; unit < stop; unit += T::kWarps) {
      const int i = unit - row.begin;
      const std::uint8_t* keys = feed.wait();
      const auto values = [&] {
        feed.next();
        return feed.wait();
      };
      if (i < row.num_units) {
        work.shadow(i, keys, values);
      } else {
        work.tile(row.tile + i - row.num_units, feed.readable(), keys, values);
      }
      feed.next();
    }
    lay_down<T>(s, work.acc, a.rows_in_use);
    const bool whole = row.begin >= begin && row.end <= end;
    float* partial = nullptr;
    if (!whole) {
      const int which = begin > row.begin ? 0 : 1;
      partial = a.partials + (2 * static_cast<std::int64_t>(blockIdx.x) + which) *
                                 partial_floats(T::kRows, T::kHeadDim);
      shared[num_shared++] = row;
    }
    store_share<T>(a, s, row, partial, a.rows_in_use);
    if (row.end >= end) break;
    row = find_row(a, row.end, row.request);
  }

  if (num_shared == 0) return;
  sync_workers<T>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < num_shared; ++i) {
      const ListRow& r = shared[i];
      const int first = shares.of(r.begin);
      const int parts = shares.of(r.end - 1) - first + 1;
      // One counter a row; rows are told apart by the block that holds their first unit, and of
      // the rows that begin in a block only the last is shared.
      const int before = arrive(a.arrivals + first);
      s.last[i] = before == parts - 1 ? 1 : 0;
      if (s.last[i] != 0) a.arrivals[first] = 0;
    }
  }
  sync_workers<T>();
  for (int i = 0; i < num_shared; ++i) {
    if (s.last[i] != 0) merge_blocks<T>(a, shared[i], shares, a.rows_in_use);
  }
}

}  // namespace bitdecoding::cuda
