// SPDX-License-Identifier: Apache-2.0
// amax6: the block's maximum lands on the largest code, 6 (NVFP4's usual rule).
#pragma once

#include "scale/block.h"

namespace bitdecoding {

struct Amax6 {
  template <class Block = PlainBlock>
  BD_HOST_DEVICE static constexpr std::uint8_t choose(const float* x, int n, float outer_scale) {
    return encode_e4m3(Block::amax(x, n) / 6.0F / outer_scale);
  }
};

}  // namespace bitdecoding
