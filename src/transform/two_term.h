// SPDX-License-Identifier: Apache-2.0
// The two-term query: q ~ q1 + q2, both NVFP4 in blocks of 16 along head_dim under amax6, q2 the
// quantized residual of q1 ("dual residual query quantization"). With one term q2 is zero.
#pragma once

#include <cstdint>

#include "scale/amax6.h"

namespace bitdecoding {

inline constexpr int kQueryBlock = 16;

// One block of a query as codes and scales; a term with scale zero has codes of zero.
struct TwoTermBlock {
  std::uint8_t codes[2][kQueryBlock];
  float scales[2];
};

BD_HOST_DEVICE constexpr TwoTermBlock quantize_two_term(const float* q, int terms) {
  TwoTermBlock block = {};
  float residual[kQueryBlock] = {};
  for (int i = 0; i < kQueryBlock; ++i) residual[i] = q[i];
  for (int term = 0; term < terms; ++term) {
    const float scale = decode_e4m3(Amax6::choose(residual, kQueryBlock, 1.0F));
    block.scales[term] = scale;
    encode_block(residual, kQueryBlock, scale, block.codes[term]);
    for (int i = 0; i < kQueryBlock; ++i) {
      residual[i] = residual[i] - decode_e2m1(block.codes[term][i]) * scale;
    }
  }
  return block;
}

// term1, term2: dequantized values, head_dim each; head_dim is a multiple of 16.
BD_HOST_DEVICE constexpr void split_two_term(const float* q, int head_dim, int terms, float* term1,
                                             float* term2) {
  for (int base = 0; base < head_dim; base += kQueryBlock) {
    const TwoTermBlock block = quantize_two_term(q + base, terms);
    for (int i = 0; i < kQueryBlock; ++i) {
      term1[base + i] = decode_e2m1(block.codes[0][i]) * block.scales[0];
      term2[base + i] = decode_e2m1(block.codes[1][i]) * block.scales[1];
    }
  }
}

}  // namespace bitdecoding
