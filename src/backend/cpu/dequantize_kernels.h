// SPDX-License-Identifier: Apache-2.0
// One 64-token tile of a page as floats in the original space: what prefill and gather read.
//
// Cost model: 2 x 64 x head_dim values; a value costs about three operations to decode and one
// product, a key log2(head_dim) additions more for the rotation. The output, 8 bytes written a
// byte-and-an-eighth read, bounds it once it leaves the first-level cache.
#pragma once

#include <cstdint>

#include "bitdecoding/format.h"

namespace bitdecoding::cpu {

struct DequantizeArgs {
  Format format = Format::kNvfp4;
  int head_dim = 0;
  const std::uint8_t* tile = nullptr;  // tile_parts(format, head_dim).bytes, kQuad order
  // Tokens from here on are written as zero whatever the tile holds there.
  int valid_tokens = kTileTokens;
  bool hadamard = true;              // rotates K back; tiled formats only
  const float* key_shift = nullptr;  // [head_dim] or null; tiled formats only
  float key_outer = 1.0F;            // outer scales, powers of two
  float value_outer = 1.0F;
  float* key = nullptr;    // [head_dim][64], transposed
  float* value = nullptr;  // [64][head_dim]
};

struct DequantizeKernels {
  // Writes all of `key` and `value`. Returns how many scale bytes of valid tokens are NaN; what
  // they scale comes out as NaN (for K the token's whole row, where it is rotated).
  int (*tile)(const DequantizeArgs& args) = nullptr;
};

// Kernels of a Highway target that this build contains; null otherwise.
const DequantizeKernels* dequantize_kernels(std::int64_t target);

}  // namespace bitdecoding::cpu
