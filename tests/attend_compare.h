// SPDX-License-Identifier: Apache-2.0
// What the tests of every optimised backend share: masks, steps, and the distance of two outputs.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "world.h"

namespace bitdecoding::test {

struct Masks {
  int window_left = -1;
  float softcap = 0.0F;
  const float* attn_sink = nullptr;
};

inline void set_masks(World& w, const Masks& masks) {
  w.params.window_left = masks.window_left;
  w.params.softcap = masks.softcap;
  w.params.attn_sink = masks.attn_sink;
}

// Tokens of the first sequence in each step: chunks, single tokens, drafts, and across page
// borders.
inline const std::vector<std::int64_t> kChunks = {150, 1, 1, 4, 8, 9, 1, 30, 2, 1};

// Relative L2 error over elements [first, last); infinite when an element is not finite.
inline double relative_error(const std::vector<float>& got, const std::vector<float>& want,
                             std::size_t first, std::size_t last) {
  double error = 0.0;
  double norm = 0.0;
  for (std::size_t i = first; i < last; ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    error += (static_cast<double>(got[i]) - want[i]) * (static_cast<double>(got[i]) - want[i]);
    norm += static_cast<double>(want[i]) * want[i];
  }
  return norm == 0.0 ? std::sqrt(error) : std::sqrt(error / norm);
}

}  // namespace bitdecoding::test
