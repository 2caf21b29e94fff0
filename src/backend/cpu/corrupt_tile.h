// SPDX-License-Identifier: Apache-2.0
// Tiles whose scale bytes no writer produces: their elements are NaN. Kernels lose a NaN in maxima
// and in the conversion to integers, and spread it by products with probability 0. So it is taken
// out before them and put where it belongs after them: a corrupt key spoils the rows that see it, a
// corrupt value its own channel of those rows, and nothing else changes.
#pragma once

#include <array>
#include <cstdint>

#include "backend/cpu/tile_source.h"

namespace bitdecoding::cpu {

class CorruptTile {
 public:
  // Puts zeros in the place of the tile's NaNs and remembers where they were.
  CorruptTile(FloatTileBuffer* tile, int head_dim);
  // Spoils the partial result of a row that sees the tokens of `mask`; false when it sees no NaN.
  bool spoil(std::uint64_t mask, float* sum, float* out) const;

 private:
  int head_dim_;
  std::uint64_t keys_ = 0;                              // tokens
  std::array<std::uint64_t, kMaxHeadDim> values_ = {};  // tokens of each channel
};

// FloatKernels::tile over such a tile; true when one of the rows sees a NaN.
bool attend_corrupt_tile(const FloatKernels& kernels, FloatTileBuffer* tile,
                         const std::uint64_t* masks, const FloatState& state);

void count_corrupt(const AttendParams& params, int scales);

}  // namespace bitdecoding::cpu
