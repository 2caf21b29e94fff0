// SPDX-License-Identifier: Apache-2.0
// Sizes of a decode kernel and what its block keeps in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/decode.h"
#include "common/ring.cuh"
#include "page/layout.h"

namespace bitdecoding::cuda {

inline constexpr float kLog2e = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;
inline constexpr float kSlack = 8.0F;
// Instead of -inf, so that differences of two empty maxima are numbers.
inline constexpr float kNoMaximum = -1.0e30F;

// What a thread of the warps that copy keeps where registers change hands.
inline constexpr int kCopyRegisters = 32;

template <Format kFormat_, int kHeadDim_, int kColumnBlocks_, class Arch>
struct DecodeTraits {
  static constexpr Format kFormat = kFormat_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kColumnBlocks = kColumnBlocks_;
  static constexpr int kRows = kColumns * kColumnBlocks;
  static constexpr int kWarps = Arch::warps(kHeadDim, kColumnBlocks);
  static constexpr int kEntries = Arch::entries(kHeadDim, kColumnBlocks);
  static constexpr int kRegisters = Arch::registers(kHeadDim, kColumnBlocks);
  static constexpr int kKeyBlocks = layout::key_column_blocks(kHeadDim);
  static constexpr int kValueGroups = kHeadDim / 16;
  static constexpr layout::TileParts kParts = layout::tile_parts(kFormat, kHeadDim);
  static constexpr int kKeyBytes = static_cast<int>(kParts.value_codes);
  static constexpr int kValueBytes = static_cast<int>(kParts.bytes - kParts.value_codes);
  static constexpr int kRowBytes = kUnitRows * kHeadDim * 2;
  static constexpr int kEntryBytes = kKeyBytes > kRowBytes ? kKeyBytes : kRowBytes;
  static_assert(kValueBytes <= kEntryBytes && kEntryBytes % 16 == 0);
  using Ring = typename Arch::template Ring<kEntryBytes, kEntries>;
  // A ring that a warp of its own fills adds that warp to the block, and three idle ones where
  // registers change hands: that is done by four warps together.
  static_assert(kRegisters == 0 || kWarps % 4 == 0);
  static constexpr int kCopyWarps = !Ring::kOwnWarp ? 0 : kRegisters == 0 ? 1 : 4;
  static constexpr int kThreads = 32 * (kWarps + kCopyWarps);
  static constexpr int kAtStart = 65536 / kThreads / 8 * 8;  // registers of a thread
  static_assert(kRegisters == 0 ||
                    (kRegisters % 8 == 0 && kRegisters >= kAtStart &&
                     4 * (kAtStart - kCopyRegisters) >= kWarps * (kRegisters - kAtStart)),
                "the copying warps leave fewer registers than the computing ones take: the kernel "
                "would wait for ever");
};

// What a row needs besides its units; in shared memory.
template <class T>
struct RowState {
  // Queries, padded so that the eight columns of a fragment load fall into different banks.
  static constexpr int kPitch = T::kHeadDim + 8;
  __half rotated[T::kRows][kPitch];      // scaled by a power of two
  __nv_bfloat16 high[T::kRows][kPitch];  // as they came: high + low
  __nv_bfloat16 low[T::kRows][kPitch];
  float factor[T::kRows];  // score in log2 units = product * factor + offset, tiles
  float offset[T::kRows];
  std::int32_t position[T::kRows];  // of the query; -1: no such row, sees nothing
};

template <class T>
struct SharedStorage {
  static constexpr int kMergePitch = T::kHeadDim + 4;
  typename T::Ring ring[T::kWarps];
  RowState<T> row;
  float maximum[T::kWarps][T::kRows];
  float sum[T::kWarps][T::kRows];
  std::int32_t last[2];
  float merge[1];  // [kWarps][rows in use][kMergePitch]
};

template <class T>
constexpr std::int64_t decode_shared_bytes(int rows_in_use) {
  return static_cast<std::int64_t>(sizeof(SharedStorage<T>)) +
         std::int64_t{4} * T::kWarps * rows_in_use * SharedStorage<T>::kMergePitch;
}

// Barrier of the warps that compute.
template <class T>
__device__ inline void sync_workers() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * T::kWarps) : "memory");
}

}  // namespace bitdecoding::cuda
