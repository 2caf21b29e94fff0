// SPDX-License-Identifier: Apache-2.0
// mxfp4_search: the best power-of-two scale (E8M0) of three: the OCP rule's exponent
// floor(log2(amax)) - 2, then one above, then one below, the first of equals kept.
#pragma once

#include "scale/block.h"

namespace bitdecoding {

struct Mxfp4Search {
  template <class Block = PlainBlock>
  BD_HOST_DEVICE static constexpr std::uint8_t choose(const float* x, int n, float outer_scale) {
    constexpr int kOffsets[3] = {0, 1, -1};
    const float amax = Block::amax(x, n) / outer_scale;
    if (amax == 0.0F) return 0;
    const int base = floor_log2(amax) - 2;
    std::uint8_t best = 0;
    float best_error = 0.0F;
    bool have = false;
    for (const int offset : kOffsets) {
      const std::uint8_t code = encode_e8m0_exponent(base + offset);
      const float error = Block::squared_error(x, n, decode_e8m0(code) * outer_scale);
      if (!have || error < best_error) {
        have = true;
        best_error = error;
        best = code;
      }
    }
    return best;
  }
};

// The OCP rule itself (no search): what other systems call plain MXFP4.
struct Mxfp4Floor {
  template <class Block = PlainBlock>
  BD_HOST_DEVICE static constexpr std::uint8_t choose(const float* x, int n, float outer_scale) {
    const float amax = Block::amax(x, n) / outer_scale;
    return amax == 0.0F ? std::uint8_t{0} : encode_e8m0_exponent(floor_log2(amax) - 2);
  }
};

}  // namespace bitdecoding
