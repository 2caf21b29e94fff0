// SPDX-License-Identifier: Apache-2.0
// The slots of the shadow directory, by one block of threads: pins, victims, and who gets what.
// page/shadow_slots.h states the order in which entries go.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "common/directory.h"

namespace bitdecoding::cuda {

inline constexpr int kPlanThreads = 512;
enum : int { kNone = 0, kTail = 1, kSink = 2, kPartial = 3 };

using Scan = cub::BlockScan<int, kPlanThreads>;

struct Shared {
  Scan::TempStorage scan;
  int histogram[256];
  int need_hard, need_tail, threshold_digit, remaining;
  int most;
};

__device__ inline void release_slot(const BuildArgs& a, int slot) {
  a.index[a.slots[slot].key] = -1;
  a.slots[slot].key = -1;
  a.free_slots[atomicAdd(&a.state->free_count, 1)] = slot;
}

struct Slots {
  const BuildArgs& a;
  Shared& s;
  std::uint32_t step;

  __device__ void pin(int slot, int why, int distance) const {
    const std::uint32_t low = (static_cast<std::uint32_t>(why) << 30) |
                              (kFarthest - static_cast<std::uint32_t>(min(distance, 1 << 29)));
    atomicMax(&a.slots[slot].pin, (static_cast<unsigned long long>(step) << 32) | low);
    a.slots[slot].stamp = 2 * step + 1;
  }
  __device__ void release(int slot) const { release_slot(a, slot); }

  __device__ bool needs_slot(const Want& want) const {
    return want.pin != kNone && a.index[want.key] < 0;
  }

  // Victims first to last: entries that are not pinned, oldest first and sinks last; then pinned
  // tails, farthest from their sequence's end first. All ones: may not be dropped.
  __device__ std::uint32_t victim_order(const SlotEntry& e) const {
    if (e.key < 0) return 0xFFFFFFFFU;
    if ((e.pin >> 32) == step) {
      const auto low = static_cast<std::uint32_t>(e.pin);
      if ((low >> 30) != kTail) return 0xFFFFFFFFU;
      return 0x80000000U | (low & kFarthest);
    }
    return (e.sink != 0 ? 0x40000000U : 0U) | (e.stamp & 0x3FFFFFFFU);
  }

  // Frees the first `count` victims with an order below `limit`, as many as there are.
  __device__ void evict(int count, std::uint32_t limit) {
    std::uint32_t prefix = 0;
    int remaining = count;
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int i = threadIdx.x; i < 256; i += kPlanThreads) s.histogram[i] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < a.num_slots; i += kPlanThreads) {
        const std::uint32_t order = victim_order(a.slots[i]);
        if (order >= limit) continue;
        if (shift < 24 && (order >> (shift + 8)) != (prefix >> (shift + 8))) continue;
        atomicAdd(&s.histogram[(order >> shift) & 255U], 1);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        int digit = 0;
        while (digit < 255 && s.histogram[digit] < remaining) remaining -= s.histogram[digit++];
        s.threshold_digit = digit;
        s.remaining = remaining;
      }
      __syncthreads();
      prefix |= static_cast<std::uint32_t>(s.threshold_digit) << shift;
      remaining = s.remaining;
      __syncthreads();
    }
    // All below `prefix` go, and `remaining` of those that equal it, in the order of slots.
    int ties = 0;
    for (int base = 0; base < a.num_slots; base += kPlanThreads) {
      const int slot = base + static_cast<int>(threadIdx.x);
      const std::uint32_t order = slot < a.num_slots ? victim_order(a.slots[slot]) : 0xFFFFFFFFU;
      const bool tie = order == prefix && order < limit;
      int index = 0;
      int total = 0;
      Scan(s.scan).ExclusiveSum(tie ? 1 : 0, index, total);
      __syncthreads();
      const bool goes = order < limit && (order < prefix || (tie && ties + index < remaining));
      if (goes) {
        release(slot);
        atomicAdd(&a.state->evicted_slots, 1ULL);
      }
      ties += total;
      __syncthreads();
    }
  }

  // Takes the free slot number `rank` from the top.
  __device__ void give(const Want& want, int rank) const {
    const int slot = a.free_slots[a.state->free_count - 1 - rank];
    SlotEntry& e = a.slots[slot];
    e.key = want.key;
    e.valid_begin = e.valid_end = 0;
    e.sink = want.sink;
    e.pin = 0;
    a.index[want.key] = slot;
    pin(slot, want.pin, want.distance);
  }

  // Rank of a tail among the tails that need a slot: nearer to the end first.
  __device__ int tail_rank(int write, int num_writes) const {
    const int distance = a.wants[write].distance;
    int rank = 0;
    for (int i = 0; i < num_writes; ++i) {
      const Want other = a.wants[i];
      if (other.pin != kTail || a.index[other.key] >= 0) continue;
      if (other.distance < distance || (other.distance == distance && i < write)) ++rank;
    }
    return rank;
  }

  __device__ void give_slots() {
    const int num_writes = a.state->num_writes;
    int hard = 0;
    int tails = 0;
    for (int i = threadIdx.x; i < num_writes; i += kPlanThreads) {
      const Want want = a.wants[i];
      if (!needs_slot(want)) continue;
      if (want.pin == kTail) {
        ++tails;
      } else {
        ++hard;
      }
    }
    if (threadIdx.x == 0) s.need_hard = s.need_tail = 0;
    __syncthreads();
    if (hard > 0) atomicAdd(&s.need_hard, hard);
    if (tails > 0) atomicAdd(&s.need_tail, tails);
    __syncthreads();
    const int need = s.need_hard + s.need_tail;
    if (need == 0) return;
    if (need > a.state->free_count) {
      evict(need - a.state->free_count, 0x80000000U);
      __syncthreads();
      if (s.need_hard > a.state->free_count) evict(s.need_hard - a.state->free_count, 0xFFFFFFFFU);
      __syncthreads();
    }
    const int room = a.state->free_count;
    const int tail_room = max(min(room - s.need_hard, s.need_tail), 0);
    const bool rank_tails = tail_room < s.need_tail;
    int taken = 0;
    // Decisions first: giving a slot changes what tail_rank counts.
    for (int base = 0; base < num_writes; base += kPlanThreads) {
      const int i = base + static_cast<int>(threadIdx.x);
      Want want;
      bool takes = false;
      if (i < num_writes) {
        want = a.wants[i];
        takes = needs_slot(want) &&
                (want.pin != kTail || !rank_tails || tail_rank(i, num_writes) < tail_room);
      }
      int index = 0;
      int total = 0;
      Scan(s.scan).ExclusiveSum(takes ? 1 : 0, index, total);
      __syncthreads();
      if (takes && taken + index < room) a.wants[i].takes = 1;
      taken += total;
    }
    __syncthreads();
    taken = 0;
    for (int base = 0; base < num_writes; base += kPlanThreads) {
      const int i = base + static_cast<int>(threadIdx.x);
      const bool takes = i < num_writes && a.wants[i].takes != 0;
      int index = 0;
      int total = 0;
      Scan(s.scan).ExclusiveSum(takes ? 1 : 0, index, total);
      __syncthreads();
      if (takes) give(a.wants[i], taken + index);
      taken += total;
    }
    __syncthreads();
    if (threadIdx.x == 0) a.state->free_count -= taken;
    __syncthreads();
  }
};

}  // namespace bitdecoding::cuda
