// SPDX-License-Identifier: Apache-2.0
// Where the tiles of a request come from: page addresses, and 64-token tiles of float K and V.
#pragma once

#include <cstdint>

#include "backend/cpu/attend.h"
#include "backend/cpu/rows.h"

namespace bitdecoding::cpu {

// A tile as the float kernels read it.
struct FloatTileBuffer {
  alignas(64) float key[256 * kTileTokens];    // [head_dim][64]
  alignas(64) float value[kTileTokens * 256];  // [64][head_dim]
  alignas(64) float rows[kTileTokens * 256];   // keys on their way: [64][head_dim]
};

// Where a page's tile is read into: the tensors' own space, or as tiled pages store it, where K is
// shifted and rotated and neither side has its outer scale.
enum class TileSpace : std::uint8_t { kOriginal, kStored };

// Values of tokens outside `seen` become zero: their bytes may be anything where nobody wrote them,
// and a probability of 0 times infinity or NaN is NaN.
void clear_unseen_values(std::uint64_t seen, int head_dim, FloatTileBuffer* tile);

class TileSource {
 public:
  TileSource(const AttendParams& params, const AttendKernels& kernels, const RequestRows& rows,
             int kv_head)
      : params_(params), kernels_(kernels), rows_(rows), kv_head_(kv_head) {}

  // The tile's bytes, or null when the block table has no page for it.
  const std::uint8_t* page_tile(std::int64_t tile) const;
  // Dequantizes a page's tile; rows past the sequence are zero. Returns the number of NaN scale
  // bytes met.
  int load_page_tile(std::int64_t tile, TileSpace space, FloatTileBuffer* buffer) const;
  // The positions of `available` from the chunk and the shadow slots; other rows are zero.
  void load_bf16_tile(std::int64_t tile, std::uint64_t available, FloatTileBuffer* buffer) const;

 private:
  void load_tensor_row(const TensorView& tensor, std::int64_t row, float* out) const;
  void load_chunk_rows(std::int64_t base, FloatTileBuffer* buffer) const;

  const AttendParams& params_;
  const AttendKernels& kernels_;
  const RequestRows& rows_;
  int kv_head_;
};

}  // namespace bitdecoding::cpu
