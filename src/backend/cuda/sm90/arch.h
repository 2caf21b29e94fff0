// SPDX-License-Identifier: Apache-2.0
// Decode on Hopper: rings filled by bulk copies; 227 KiB of shared memory a block.
#pragma once

namespace bitdecoding::cuda {

template <int kEntryBytes, int kEntries>
struct BulkRing;

struct Sm90 {
  template <int kEntryBytes, int kEntries>
  using Ring = BulkRing<kEntryBytes, kEntries>;
  // Warps of a block that compute, and half tiles in each warp's ring. Two warps of a scheduler
  // leave a third of its time unused, waiting for what they asked for last; three fit.
  static constexpr int warps(int head_dim, int column_blocks) {
    if (head_dim > 128) return 8;
    return column_blocks == 1 ? 12 : 8;
  }
  static constexpr int entries(int head_dim, int column_blocks) {
    if (head_dim > 128) return head_dim > 192 ? 2 : 3;
    if (head_dim <= 64) return column_blocks == 1 ? 6 : 8;
    return head_dim <= 128 && column_blocks == 1 ? 3 : 4;
  }
  // What a computing thread has when the warps that copy have left it their registers; 0: what the
  // compiler gives it. 512 threads begin with 128 registers, 384 with 168.
  static constexpr int registers(int head_dim, int column_blocks) {
    return head_dim <= 128 && column_blocks == 1 ? 160 : 232;
  }
};

}  // namespace bitdecoding::cuda
