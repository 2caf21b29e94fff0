// SPDX-License-Identifier: Apache-2.0
// Rings of shared-memory entries that are filled from global memory ahead of use. Each warp reads
// its own ring, so __syncwarp is all the synchronisation that an entry's reuse needs among its
// readers.
//
// A feed is how a warp gets its entries in turn: wait() returns the entry when its content has
// arrived, next() gives it back and goes on, readable() says whether the entry holds what was asked
// for. An architecture brings its own.
#pragma once

#include <cstdint>

#include "common/mma.cuh"

namespace bitdecoding::cuda {

// ---- Hopper: one bulk copy an entry, issued by a warp of its own
// ---------------------------------

__device__ inline void barrier_init(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline bool barrier_done(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// `bytes` (a multiple of 16) into shared memory; the barrier completes with them. Each byte is read
// once a step: it should not push other things out of L2.
__device__ inline void bulk_copy(std::uint32_t to, const std::uint8_t* from, std::uint32_t bytes,
                                 std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], policy;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same as far as L2. What is written there later is seen by the copy that follows.
__device__ inline void bulk_prefetch(const std::uint8_t* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Shared memory of one warp's ring.
template <int kEntryBytes, int kEntries>
struct BulkRing {
  static constexpr bool kOwnWarp = true;  // filled by a warp that does nothing else
  alignas(128) std::uint8_t entries[kEntries][kEntryBytes];
  alignas(8) std::uint64_t full[kEntries];
  std::uint64_t empty[kEntries];
  std::uint32_t unreadable[kEntries];

  // By one thread, before the block's first barrier.
  __device__ void init() {
    for (int i = 0; i < kEntries; ++i) {
      barrier_init(shared_address(&full[i]));
      barrier_init(shared_address(&empty[i]));
    }
    // The copy engine must see the initialised barriers.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

template <class Ring, int kEntries>
class BulkFeed {
 public:
  __device__ explicit BulkFeed(Ring& ring) : ring_(ring) {}

  __device__ const std::uint8_t* wait() const {
    barrier_wait(shared_address(&ring_.full[entry_]), parity_);
    return ring_.entries[entry_];
  }
  __device__ bool readable() const { return ring_.unreadable[entry_] == 0; }
  __device__ void next() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(shared_address(&ring_.empty[entry_]));
    if (++entry_ == kEntries) {
      entry_ = 0;
      parity_ ^= 1U;
    }
  }

 private:
  Ring& ring_;
  int entry_ = 0;
  std::uint32_t parity_ = 0;
};

// One lane's side of a ring. The next copy is always known, so that it is issued at once when its
// entry is free.
template <class Ring, int kEntries, class Producer>
class BulkSource {
 public:
  __device__ BulkSource(Ring& ring, Producer producer) : ring_(ring), producer_(producer) {
    prepare();
  }

  __device__ bool done() const { return !exists_; }
  // Asks for the first bytes as far as L2, which may be before the predecessor has ended.
  __device__ void prefetch() const {
    if (exists_) bulk_prefetch(copy_.from, static_cast<std::uint32_t>(copy_.bytes));
  }
  // Whether the next entry may be filled.
  __device__ bool is_free() const {
    return barrier_done(shared_address(&ring_.empty[entry_]), parity_ ^ 1U);
  }
  __device__ void fill() {
    ring_.unreadable[entry_] = copy_.unreadable ? 1U : 0U;
    bulk_copy(shared_address(ring_.entries[entry_]), copy_.from,
              static_cast<std::uint32_t>(copy_.bytes), shared_address(&ring_.full[entry_]));
    if (++entry_ == kEntries) {
      entry_ = 0;
      parity_ ^= 1U;
    }
    prepare();
  }

 private:
  __device__ void prepare() {
    exists_ = !producer_.done();
    if (exists_) copy_ = producer_.next();
  }

  Ring& ring_;
  Producer producer_;
  typename Producer::Copy copy_ = {};
  bool exists_ = false;
  int entry_ = 0;
  std::uint32_t parity_ = 0;
};

// ---- Ampere and Ada: sixteen bytes a lane and instruction, by the warp that reads
// ----------------

template <int kEntryBytes, int kEntries>
struct AsyncCopyRing {
  static constexpr bool kOwnWarp = false;
  alignas(128) std::uint8_t entries[kEntries][kEntryBytes];

  __device__ void init() {}
};

template <class Ring, int kEntries, class Producer>
class AsyncCopyFeed {
 public:
  __device__ AsyncCopyFeed(Ring& ring, Producer producer) : ring_(ring), producer_(producer) {
    for (int i = 0; i < kEntries; ++i) {
      fill();
      advance();
    }
  }

  // Entries are filled and waited for in turn: when this one is needed, kEntries - 1 younger fills
  // may still be under way. A warp that has nothing left to fill commits empty groups.
  __device__ const std::uint8_t* wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kEntries - 1) : "memory");
    __syncwarp();
    return ring_.entries[entry_];
  }
  __device__ bool readable() const { return ((unreadable_ >> entry_) & 1U) == 0; }
  __device__ void next() {
    __syncwarp();
    fill();
    advance();
  }

 private:
  __device__ void advance() { entry_ = entry_ + 1 == kEntries ? 0 : entry_ + 1; }
  __device__ void fill() {
    if (!producer_.done()) {
      const auto copy = producer_.next();
      unreadable_ = copy.unreadable ? unreadable_ | (1U << entry_) : unreadable_ & ~(1U << entry_);
      const std::uint32_t to = shared_address(ring_.entries[entry_]);
      for (int at = 16 * static_cast<int>(threadIdx.x & 31); at < copy.bytes; at += 512) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(copy.from + at)
                     : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  Ring& ring_;
  Producer producer_;
  int entry_ = 0;
  std::uint32_t unreadable_ = 0;
};

}  // namespace bitdecoding::cuda
