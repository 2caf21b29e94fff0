// SPDX-License-Identifier: Apache-2.0
// Decode on Hopper: rings filled by bulk copies; 227 KiB of shared memory a block.
#pragma once

namespace bitdecoding::cuda {

template <int kEntryBytes, int kEntries>
struct BulkRing;

struct Sm90 {
  template <int kEntryBytes, int kEntries>
  using Ring = BulkRing<kEntryBytes, kEntries>;
  // Warps of a block, and half tiles in each warp's ring.
  static constexpr int warps(int head_dim) { return head_dim <= 128 ? 8 : 4; }
  static constexpr int entries(int head_dim, int) { return head_dim <= 64 ? 8 : 4; }
};

}  // namespace bitdecoding::cuda
