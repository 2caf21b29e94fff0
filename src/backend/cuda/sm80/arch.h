// SPDX-License-Identifier: Apache-2.0
// Decode on Ampere and Ada: rings filled by sixteen-byte asynchronous copies; 99 KiB of shared
// memory are on all of them.
#pragma once

namespace bitdecoding::cuda {

template <int kEntryBytes, int kEntries>
struct AsyncCopyRing;

struct Sm80 {
  template <int kEntryBytes, int kEntries>
  using Ring = AsyncCopyRing<kEntryBytes, kEntries>;
  // Warps of a block, and half tiles in each warp's ring: two query blocks need more room to be
  // added up in.
  static constexpr int warps(int, int) { return 4; }
  // All warps keep what the compiler gives them.
  static constexpr int registers(int, int) { return 0; }
  static constexpr int entries(int head_dim, int column_blocks) {
    if (head_dim <= 64) return 6;
    return head_dim <= 128 && column_blocks == 1 ? 4 : 2;
  }
};

}  // namespace bitdecoding::cuda
