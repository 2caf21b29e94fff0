// SPDX-License-Identifier: Apache-2.0
// four_six: of the scales amax/6 and amax/4 the one with the smaller squared error; amax/6 when
// they tie. With amax/4 the maximum lands on code 4, whose neighbours are closer than 6's.
#pragma once

#include "scale/block.h"

namespace bitdecoding {

struct FourSix {
  template <class Block = PlainBlock>
  BD_HOST_DEVICE static constexpr std::uint8_t choose(const float* x, int n, float outer_scale) {
    const float amax = Block::amax(x, n);
    const std::uint8_t six = encode_e4m3(amax / 6.0F / outer_scale);
    const std::uint8_t four = encode_e4m3(amax / 4.0F / outer_scale);
    if (four == 0) return 0;
    const float error_six = six == 0 ? Block::squared_norm(x, n)
                                     : Block::squared_error(x, n, decode_e4m3(six) * outer_scale);
    const float error_four = Block::squared_error(x, n, decode_e4m3(four) * outer_scale);
    return error_four < error_six ? four : six;
  }
};

}  // namespace bitdecoding
