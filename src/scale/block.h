// SPDX-License-Identifier: Apache-2.0
// What every scale rule shares: the block's maximum, the error of one candidate scale, and the
// codes under a chosen scale. A rule is one header: a struct with
//     static constexpr std::uint8_t choose(const float* x, int n, float outer_scale)
// that returns the scale code of a block of n values (16 or 32), a template over Block: maximum and
// errors come from it, so that a device can bring its own way to the same bits. See HACKING.md to
// add one.
//
// Determinism: all backends give bit-equal codes, so every operation here is a single IEEE float
// operation in a stated order. Build with -ffp-contract=off; do not use fused multiply-add.
#pragma once

#include <cstdint>
#include <limits>

#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "numeric/portable.h"

namespace bitdecoding {

inline constexpr int kMaxScaleBlock = 32;

// Largest magnitude, at most float's largest. Callers have replaced NaN and infinity by zero and
// counted them; a rotation can make both anew of values near that: NaN is passed over, and infinity
// must not choose a scale whose values overflow.
BD_HOST_DEVICE constexpr float block_amax(const float* x, int n) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  float amax = 0.0F;
  for (int i = 0; i < n; ++i) {
    const float m = x[i] < 0.0F ? -x[i] : x[i];
    amax = m > amax ? m : amax;
  }
  return amax < kLargest ? amax : kLargest;
}

// Squared error of a block under `scale` (block scale times outer scale), 0 < scale < inf.
// d_i = x_i - code_i * scale, where the product is exact; the squares are added as a balanced
// tree that halves the block: (i, i + n/2), then (i, i + n/4), ... The order is part of the
// contract: it decides ties, and SIMD lanes can follow it.
BD_HOST_DEVICE constexpr float block_squared_error(const float* x, int n, float scale) {
  float sum[kMaxScaleBlock] = {};
  for (int i = 0; i < n; ++i) {
    const float d = x[i] - decode_e2m1(encode_e2m1(x[i] / scale)) * scale;
    sum[i] = d * d;
  }
  for (int half = n / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
  }
  return sum[0];
}

// Squared error when every value of the block becomes zero (scale code 0).
BD_HOST_DEVICE constexpr float block_squared_norm(const float* x, int n) {
  float sum[kMaxScaleBlock] = {};
  for (int i = 0; i < n; ++i) sum[i] = x[i] * x[i];
  for (int half = n / 2; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
  }
  return sum[0];
}

// Maximum and errors as they are written above.
struct PlainBlock {
  BD_HOST_DEVICE static constexpr float amax(const float* x, int n) { return block_amax(x, n); }
  BD_HOST_DEVICE static constexpr float squared_error(const float* x, int n, float scale) {
    return block_squared_error(x, n, scale);
  }
  BD_HOST_DEVICE static constexpr float squared_norm(const float* x, int n) {
    return block_squared_norm(x, n);
  }
};

// Codes of a block under a scale. A scale of zero gives codes of zero, signs included, so that a
// zero block has one representation.
BD_HOST_DEVICE constexpr void encode_block(const float* x, int n, float scale,
                                           std::uint8_t* codes) {
  for (int i = 0; i < n; ++i)
    codes[i] = scale == 0.0F ? std::uint8_t{0} : encode_e2m1(x[i] / scale);
}

}  // namespace bitdecoding
