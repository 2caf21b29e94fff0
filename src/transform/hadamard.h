// SPDX-License-Identifier: Apache-2.0
// The orthonormal Hadamard rotation over head_dim, in blocks of the largest power of two that
// divides it: 64, 128 and 256 are one block; 96 is three of 32, 192 three of 64. (H is symmetric
// and orthonormal, so the same call rotates back.)
//
// Determinism: stages of stride 1, 2, 4, ...; each writes a + b and a - b; then one product with
// the float nearest to 1/sqrt(block). All backends follow this order, so rotated keys are
// bit-equal before they are quantized.
#pragma once

#include "numeric/portable.h"

namespace bitdecoding {

BD_HOST_DEVICE constexpr int hadamard_block(int head_dim) { return head_dim & -head_dim; }

// The float nearest to 2^(-log2/2).
BD_HOST_DEVICE constexpr float hadamard_scale(int block) {
  float scale = 1.0F;
  int n = block;
  for (; n >= 4; n /= 4) scale *= 0.5F;
  return n == 2 ? scale * 0.70710678118654752F : scale;
}

BD_HOST_DEVICE constexpr void hadamard(float* x, int head_dim) {
  const int block = hadamard_block(head_dim);
  const float scale = hadamard_scale(block);
  for (int base = 0; base < head_dim; base += block) {
    for (int stride = 1; stride < block; stride *= 2) {
      for (int i = 0; i < block; i += 2 * stride) {
        for (int j = i; j < i + stride; ++j) {
          const float a = x[base + j];
          const float b = x[base + j + stride];
          x[base + j] = a + b;
          x[base + j + stride] = a - b;
        }
      }
    }
    for (int i = 0; i < block; ++i) x[base + i] = x[base + i] * scale;
  }
}

}  // namespace bitdecoding
