// SPDX-License-Identifier: Apache-2.0
// Value means: pages hold V without them, so a sum over pages lacks (sum of weights) * mean.
#pragma once

#include <cstdint>

#include "backend/cpu/attend_scratch.h"
#include "bitdecoding/quantize.h"

namespace bitdecoding::cpu {

// [head_dim] of a KV head, or null.
inline const float* value_shift_of(const LayerConfig& layer, int kv_head) {
  if (layer.value_shift == nullptr) return nullptr;
  return layer.value_shift + static_cast<std::int64_t>(kv_head) * layer.geometry.head_dim;
}

// Adds to each row of a partial result what its positions, all of them in pages, left out.
inline void add_value_shift(const LayerConfig& layer, int kv_head, int rows,
                            const PartialView& partial) {
  const float* shift = value_shift_of(layer, kv_head);
  if (shift == nullptr) return;
  const std::int64_t head_dim = layer.geometry.head_dim;
  for (int r = 0; r < rows; ++r) {
    if (partial.sum[r] == 0.0F) continue;
    float* out = partial.out + r * head_dim;
    for (std::int64_t d = 0; d < head_dim; ++d) out[d] += partial.sum[r] * shift[d];
  }
}

}  // namespace bitdecoding::cpu
