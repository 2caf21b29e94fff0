// SPDX-License-Identifier: Apache-2.0
// Decode attention over FP4 tiles and BF16 rows, one launch.
//
// The work of a step is a list of rows: for each request, KV head and block of query rows, first
// the request's shadow units (sixteen BF16 rows), then its tiles (64 tokens). A block of threads
// takes a part of one row or, where that balances worse, an equal run of units (plan.h: Work). Its
// warps take units in turn, each through its own ring of half units (K, then V), so that memory is
// always asked for more than is being worked on. At the end of a row's share the warps' results are
// added up; a row shared by several blocks is merged by the last of them to arrive.
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

// The warps that fill all rings: lane l of warp c serves ring c + l * kCopyWarps. A copy is issued
// for one lane at a time, which takes about 100 clocks: four warps ask for a block's first tiles in
// a quarter of the time.
template <class T>
__device__ inline void fill_rings(const DecodeArgs& a, SharedStorage<T>& s, const Start& start) {
  static_assert(T::kWarps % T::kCopyWarps == 0 && T::kWarps / T::kCopyWarps <= 32);
  constexpr int kRings = T::kWarps / T::kCopyWarps;
  const int lane = threadIdx.x & 31;
  if (lane >= kRings) return;
  const int ring = static_cast<int>(threadIdx.x >> 5) - T::kWarps + lane * T::kCopyWarps;
  BulkSource<typename T::Ring, T::kEntries, Producer<T>> source(
      s.ring[ring], Producer<T>(a, start.row, start.begin + ring, start.end));
  source.prefetch();
  wait_for_predecessor();
  // In step: a warp waits for a load whichever of its lanes asked for it, so that lanes on their
  // own would wait for each other's page numbers. Warps differ by one unit at the most.
  static_assert(T::kEntries >= 2, "a warp that waits at a row's barrier may be a unit behind");
  constexpr unsigned kLanes = 0xFFFFFFFFU >> (32 - kRings);
  while (true) {
    const bool more = !source.done();
    if (!__any_sync(kLanes, more)) return;
    while (more && !source.is_free()) __nanosleep(20);
    __syncwarp(kLanes);
    if (more) source.fill();
  }
}

template <class T>
__device__ inline auto make_feed(const DecodeArgs& a, SharedStorage<T>& s, const Start& start) {
  const int warp = threadIdx.x >> 5;
  if constexpr (T::Ring::kOwnWarp) {
    return BulkFeed<typename T::Ring, T::kEntries>(s.ring[warp]);
  } else {
    return AsyncCopyFeed<typename T::Ring, T::kEntries, Producer<T>>(
        s.ring[warp], Producer<T>(a, start.row, start.begin + warp, start.end));
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

// This warp's units of a row, and what all warps have of it in shared memory.
template <class T, class Feed>
__device__ inline void work_on_row(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row,
                                   Feed& feed, std::int32_t* unit) {
  WarpRow<T> work(a, s, row);
  wait_for_predecessor();  // until here only the plan was read
  load_queries<T>(a, s, row);
  sync_workers<T>();
  work.begin();
  for (;; *unit += T::kWarps) {
    // Read again each time: four registers less.
    const RowUnits units = s.units;
    if (*unit >= units.stop) break;
    const std::uint8_t* keys = feed.wait();
    const auto values = [&] {
      feed.next();
      return feed.wait();
    };
    if (*unit < units.shadow_end) {
      work.shadow(*unit - units.begin, keys, values);
    } else {
      work.tile(*unit + units.to_tile, feed.readable(), keys, values);
    }
    feed.next();
  }
  lay_down<T>(s, work.acc, a.rows_in_use);
}

// After the block's part of its last row is in the workspace: s.last says which of its shared rows
// no other block will add to. One counter a row; rows are told apart by the block that holds their
// first unit, and of the rows that begin in a block only the last is shared.
template <class T>
__device__ inline void find_last(const DecodeArgs& a, SharedStorage<T>& s) {
  sync_workers<T>();
  if (static_cast<int>(threadIdx.x) < s.num_shared) {
    const ListRow& r = s.shared[threadIdx.x];
    const RowBlocks blocks = blocks_of(r, s.shares);
    const bool last = arrive(a.arrivals + blocks.first) == blocks.count - 1;
    s.last[threadIdx.x] = last ? 1 : 0;
    if (last) a.arrivals[blocks.first] = 0;
  }
  sync_workers<T>();
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) std::uint8_t raw[];
  auto& s = *reinterpret_cast<SharedStorage<T>*>(raw);
  const int warp = threadIdx.x >> 5;
  const PlanHead head = load_head(a.plan);
  // A barrier is initialised for one lane at a time: each warp sees to its own ring's.
  if (warp < T::kWarps && (threadIdx.x & 31) == 0) s.ring[warp].init();
  let_successor_begin();
  const Shares shares(head.size, static_cast<int>(gridDim.x));
  const Start start = find_start(a, head, shares);
  if (start.begin >= start.end) {
    wait_for_predecessor();
    return;
  }
  if (threadIdx.x == 0) {
    s.begin = start.begin;
    s.end = start.end;
    s.shares = shares;
    s.take_row(start.row);
    s.num_shared = 0;
    s.merged = -1;
  }
  __syncthreads();
  if (warp >= T::kWarps) {
    if constexpr (T::kRegisters > 0) give_registers<kCopyRegisters>();
    if constexpr (T::Ring::kOwnWarp) fill_rings<T>(a, s, start);
    return;
  }
  if constexpr (T::kRegisters > 0) take_registers<T::kRegisters>();
  // A feed that copies by itself begins at once.
  if constexpr (!T::Ring::kOwnWarp) wait_for_predecessor();
  auto feed = make_feed<T>(a, s, start);

  std::int32_t unit = s.begin + warp;
  // First the block's own share, row by row; then the shared rows that it is the last to arrive
  // at. Both end with store_share, which is there once: instructions are fetched from far, too.
  while (true) {
    float* partial = nullptr;
    int slots = T::kWarps;
    if (s.merged < 0) {
      work_on_row<T>(a, s, s.now, feed, &unit);
      if (s.now.begin < s.begin || s.now.end > s.end) {
        const int which = s.begin > s.now.begin ? 0 : 1;
        partial = a.partials + (2 * static_cast<std::int64_t>(blockIdx.x) + which) *
                                   partial_floats(T::kRows, T::kHeadDim);
        if (threadIdx.x == 0) s.shared[s.num_shared++] = s.now;
      }
    } else {
      slots = gather_parts<T>(a, s, s.now, a.rows_in_use);
    }
    store_share<T>(a, s, s.now, slots, partial, a.rows_in_use);
    if (s.merged < 0) {
      if (s.now.end < s.end) {
        sync_workers<T>();
        if (threadIdx.x == 0) s.take_row(find_row(a, s.now.end, s.now.request));
        sync_workers<T>();
        continue;
      }
      find_last<T>(a, s);
    }
    int next = s.merged;
    do {
      if (++next == s.num_shared) return;
    } while (s.last[next] == 0);
    sync_workers<T>();
    if (threadIdx.x == 0) {
      s.now = s.shared[next];
      s.merged = next;
    }
    sync_workers<T>();
  }
}

}  // namespace bitdecoding::cuda
