// SPDX-License-Identifier: Apache-2.0
// Attention over one 64-token tile of float K and V for many query rows: BF16 tokens, the current
// chunk, dequantized prefixes and row formats all end here.
//
// Cost model: 2 * 64 * head_dim fused multiply-adds a row; per dim and four rows the kernel loads
// two vectors, broadcasts four floats and issues eight FMAs, so FMAs bound it on every target.
#pragma once

#include <cstdint>

namespace bitdecoding::cpu {

inline constexpr int kFloatRows = 32;  // rows whose scores are in flight together

struct FloatTile {
  const float* key = nullptr;    // [head_dim][64], transposed
  const float* value = nullptr;  // [64][head_dim]
  // [rows] visible tokens of each row, bit t = token t.
  const std::uint64_t* mask = nullptr;
};

struct FloatState {
  const float* query = nullptr;   // [rows][head_dim], sm_scale included
  const float* offset = nullptr;  // [rows] added to scores, or null
  float* max = nullptr;           // [rows], -inf at first
  float* sum = nullptr;           // [rows], 0 at first
  float* out = nullptr;           // [rows][head_dim], 0 at first; unnormalised
  int rows = 0;
  int head_dim = 0;  // a multiple of 32
  float softcap = 0.0F;
};

struct FloatKernels {
  // Online softmax over the tile. A row's result does not depend on the other rows, bit for bit.
  void (*tile)(const FloatTile&, const FloatState&);
  // The two halves alone: scores[row * stride + t] of up to kFloatRows rows, without mask or
  // softcap, and out[row] += probabilities[row * stride + t] * value[t].
  void (*scores)(const FloatTile&, const FloatState&, float* scores, std::int64_t stride);
  void (*accumulate)(const FloatTile&, const FloatState&, const float* probabilities,
                     std::int64_t stride);
  void (*bf16_to_float)(const std::uint16_t* in, float* out, int n);
  // attendable() of each.
  void (*clean)(float* x, int n);
  // rows[64][head_dim] -> key[head_dim][64].
  void (*transpose_keys)(const float* rows, int head_dim, float* key);
};

const FloatKernels* float_kernels(std::int64_t target);

}  // namespace bitdecoding::cpu
