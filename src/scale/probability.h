// SPDX-License-Identifier: Apache-2.0
// Scales of the probabilities P in `fp4` arithmetic: blocks of 16 tokens of c * P, where c is 1, 8
// or any positive factor that lifts small blocks out of E4M3's subnormals.
//
// amax2_or_amax6: a block whose maximum, rounded to E4M3, is at most tau is scaled by max/2, else
// by max/6. At c = 1 a block whose maximum is below 6 * 2^-10 gets scale 0 under max/6 and is
// lost; under max/2 that limit is three times lower. tau = 0 switches the rule off (amax6).
#pragma once

#include "scale/block.h"

namespace bitdecoding {

struct ProbabilityRule {
  float c = 8.0F;
  float tau = 0.0F;  // in 0..448; 0 = plain amax6

  // Scale code of n probabilities that have been multiplied by c already.
  BD_HOST_DEVICE constexpr std::uint8_t choose(const float* cp, int n) const {
    const float amax = block_amax(cp, n);
    const float rounded = decode_e4m3(encode_e4m3(amax));
    return encode_e4m3(amax / (rounded <= tau ? 2.0F : 6.0F));
  }
};

}  // namespace bitdecoding
