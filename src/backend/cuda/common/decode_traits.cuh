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

// One row of the work list: a request, KV head and block of query rows.
struct ListRow {
  std::int32_t begin = 0, end = 0;  // units in the list; from 0 on where it is shared by parts
  std::int32_t first_block = 0, num_blocks = 0;  // that share it, by parts
  std::int32_t request = 0, head = 0, block = 0;
  std::int32_t tile = 0;  // first tile
  Request of;             // the request's lengths
};

// Of numbers that are not negative.
__device__ inline std::int32_t divide(std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b));
}

// Equal runs of units, that differ by at most one, in 32-bit arithmetic.
struct Shares {
  std::int32_t base = 0, rest = 0;

  Shares() = default;
  __device__ Shares(std::int32_t units, std::int32_t blocks)
      : base(divide(units, blocks)), rest(units - base * blocks) {}
  __device__ std::int32_t begin(std::int32_t block) const {
    return block * base + min(block, rest);
  }
  // The block whose share holds unit u. Only blocks without work follow the last one that has some.
  __device__ std::int32_t of(std::int32_t u) const {
    const std::int32_t large = rest * (base + 1);
    return u < large ? divide(u, base + 1) : rest + divide(u - large, base);
  }
};

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
  // Rings that warps of their own fill add one to the block, or four where registers change hands:
  // that is done by four warps together.
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

// Units of the row that is worked on.
struct alignas(16) RowUnits {
  std::int32_t stop;        // where the block's share of it ends
  std::int32_t shadow_end;  // tiles are from here on
  std::int32_t to_tile;     // from a unit to its tile
  std::int32_t begin;
};

template <class T>
struct SharedStorage {
  static constexpr int kMergePitch = T::kHeadDim + 4;
  typename T::Ring ring[T::kWarps];
  RowState<T> row;
  float maximum[T::kWarps][T::kRows];
  float sum[T::kWarps][T::kRows];
  // Not in registers, which are short while tiles are worked on:
  ListRow now;  // the row that is worked on
  RowUnits units;
  std::int32_t begin, end;  // the block's share
  Shares shares;
  ListRow shared[2];  // rows of this block that other blocks have parts of
  std::int32_t num_shared;
  std::int32_t merged;         // the one that is merged now; -1: none yet
  std::int32_t last[2];        // whether this block is the last of them to arrive
  alignas(16) float merge[4];  // [kWarps][rows in use][kMergePitch]

  // By one thread, between barriers.
  __device__ void take_row(const ListRow& row) {
    now = row;
    const std::int32_t shadow_end = row.begin + row.of.num_units;
    units = {min(row.end, end), shadow_end, row.tile - shadow_end, row.begin};
  }
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
