// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/corrupt_tile.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

namespace bitdecoding::cpu {

CorruptTile::CorruptTile(FloatTileBuffer* tile, int head_dim) : head_dim_(head_dim) {
  for (int token = 0; token < kTileTokens; ++token) {
    const std::uint64_t bit = std::uint64_t{1} << token;
    for (int d = 0; d < head_dim; ++d) {
      float& key = tile->key[d * kTileTokens + token];
      float& value = tile->value[token * head_dim + d];
      if (std::isnan(key)) {
        keys_ |= bit;
        key = 0.0F;
      }
      if (std::isnan(value)) {
        values_[static_cast<std::size_t>(d)] |= bit;
        value = 0.0F;
      }
    }
  }
}

bool CorruptTile::spoil(std::uint64_t mask, float* sum, float* out) const {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if ((mask & keys_) != 0) {
    *sum = kNan;
    std::fill_n(out, head_dim_, kNan);
    return true;
  }
  bool seen = false;
  for (int d = 0; d < head_dim_; ++d) {
    if ((mask & values_[static_cast<std::size_t>(d)]) == 0) continue;
    out[d] = kNan;
    seen = true;
  }
  return seen;
}

bool attend_corrupt_tile(const FloatKernels& kernels, FloatTileBuffer* tile,
                         const std::uint64_t* masks, const FloatState& state) {
  const CorruptTile corrupt(tile, state.head_dim);
  kernels.tile({tile->key, tile->value, masks}, state);
  bool seen = false;
  for (int r = 0; r < state.rows; ++r) {
    float* out = state.out + static_cast<std::int64_t>(r) * state.head_dim;
    seen |= corrupt.spoil(masks[r], state.sum + r, out);
  }
  return seen;
}

void count_corrupt(const AttendParams& params, int scales) {
  if (scales == 0 || params.corrupt_scales == nullptr) return;
  std::atomic_ref<std::uint64_t>(*params.corrupt_scales)
      .fetch_add(static_cast<std::uint64_t>(scales), std::memory_order_relaxed);
}

}  // namespace bitdecoding::cpu
