// A warp's own ring of shared-memory entries that are filled from global memory ahead of use. No
// other warp touches it, so __syncwarp is all the synchronisation that an entry's reuse needs.
//
// An architecture's ring has, for all lanes of the warp together: fill (an entry from `bytes` bytes
// at `source`, both multiples of 16), fill_nothing (when the work is at its end), and wait (the
// entry's content has arrived; parity flips each time around).
#pragma once

#include <cstdint>

#include "common/mma.cuh"

namespace bitdecoding::cuda {

// Hopper: one bulk copy an entry, completion on an mbarrier.
template <int kEntryBytes, int kEntries>
class BulkRing {
 public:
  static constexpr int kBarrierBytes = 8 * kEntries;

  __device__ BulkRing(std::uint8_t* entries, std::uint64_t* barriers)
      : entries_(entries), barriers_(shared_address(barriers)) {
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers_ + 8 * i));
      }
      // The copy engine must see the initialised barriers.
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }

  __device__ std::uint8_t* entry(int i) const { return entries_ + i * kEntryBytes; }

  // Every read of the entry's last content is behind a __syncwarp.
  __device__ void fill(int i, const std::uint8_t* source, int bytes) const {
    if ((threadIdx.x & 31) != 0) return;
    const std::uint32_t barrier = barriers_ + 8 * i;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
    // Each byte is read once a step: it should not push other things out of L2.
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], policy;\n"
        "}\n" ::"r"(shared_address(entry(i))),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
  }

  __device__ void wait(int i, std::uint32_t parity) const {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready:\n"
        "}\n" ::"r"(barriers_ + 8 * i),
        "r"(parity)
        : "memory");
  }

  __device__ void fill_nothing() const {}

 private:
  std::uint8_t* entries_;
  std::uint32_t barriers_;
};

// Ampere and Ada: sixteen bytes a lane and instruction, completion in order of commit groups.
template <int kEntryBytes, int kEntries>
class AsyncCopyRing {
 public:
  static constexpr int kBarrierBytes = 0;

  __device__ AsyncCopyRing(std::uint8_t* entries, std::uint64_t*) : entries_(entries) {}

  __device__ std::uint8_t* entry(int i) const { return entries_ + i * kEntryBytes; }

  __device__ void fill(int i, const std::uint8_t* source, int bytes) const {
    const std::uint32_t to = shared_address(entry(i));
    for (int at = 16 * (threadIdx.x & 31); at < bytes; at += 512) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(source + at)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Entries are filled and waited for in turn: when this one is needed, kEntries - 1 younger fills
  // may still be under way. A warp that has nothing left to fill commits empty groups.
  __device__ void wait(int, std::uint32_t) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kEntries - 1) : "memory");
    __syncwarp();
  }
  __device__ void fill_nothing() const { asm volatile("cp.async.commit_group;" ::: "memory"); }

 private:
  std::uint8_t* entries_;
};

}  // namespace bitdecoding::cuda
