// The two-term query: q ~ q1 + q2, both NVFP4 in blocks of 16 along head_dim under amax6, q2 the
// quantized residual of q1 ("dual residual query quantization"). With one term q2 is zero.
#pragma once

#include "scale/amax6.h"

namespace bitdecoding {

inline constexpr int kQueryBlock = 16;

// term1, term2: dequantized values, head_dim each; head_dim is a multiple of 16.
BD_HOST_DEVICE constexpr void split_two_term(const float* q, int head_dim, int terms, float* term1,
                                             float* term2) {
  for (int base = 0; base < head_dim; base += kQueryBlock) {
    float residual[kQueryBlock] = {};
    for (int i = 0; i < kQueryBlock; ++i) residual[i] = q[base + i];
    for (int term = 0; term < 2; ++term) {
      float* out = (term == 0 ? term1 : term2) + base;
      if (term >= terms) {
        for (int i = 0; i < kQueryBlock; ++i) out[i] = 0.0F;
        continue;
      }
      const float scale = decode_e4m3(Amax6::choose(residual, kQueryBlock, 1.0F));
      for (int i = 0; i < kQueryBlock; ++i) {
        out[i] = scale == 0.0F ? 0.0F : decode_e2m1(encode_e2m1(residual[i] / scale)) * scale;
        residual[i] = residual[i] - out[i];
      }
    }
  }
}

}  // namespace bitdecoding
