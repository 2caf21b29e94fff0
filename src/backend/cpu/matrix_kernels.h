// SPDX-License-Identifier: Apache-2.0
// Attention of many query rows over 64-token tiles on a matrix unit that multiplies BF16 and sums
// in FP32 (Intel AMX): prefill.
//
// A float is the sum of one or two BF16 terms: one is exact for BF16 tensors and for the values of
// every page format (a code times a block scale has at most 6 significant bits), two keep 16 bits
// and stand for FP32 and FP16. Products of two low terms, below 2^-16 of the result, are left out.
//
// Cost model, a score of D dims with one term each: 4 D operations of 1,024 a clock (16 x 16 x 32
// multiply-adds in 16 clocks), D / 256 clocks; its softmax about 15 vector operations of 16 lanes
// on two ports, half a clock. At D = 128 each takes half of the time; every further term adds D /
// 512.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bitdecoding/format.h"

namespace bitdecoding::cpu {

inline constexpr int kMatrixRows =
    32;  // rows that share the loads of K and V; rows are padded to it
inline constexpr int kMatrixTiles = 4;    // tiles whose softmax is taken together
inline constexpr int kMatrixBlock = 512;  // BF16 values of a matrix operand: 16 rows of 32

// Operands are rows of blocks of kMatrixBlock values.
//   left (query)       [rows / 16][terms][head_dim / 32]      block: 16 rows x 32 dims
//   right (K, V)       [terms][depth / 32][columns / 16]      block: 16 pairs of depth x 16 columns
//   x 2
//                      K: depth = dims, columns = tokens; V: depth = tokens, columns = dims
constexpr std::size_t matrix_left_values(int rows, int head_dim, int terms) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(head_dim * terms);
}
constexpr std::size_t matrix_right_values(int head_dim, int terms) {
  return static_cast<std::size_t>(kTileTokens) * static_cast<std::size_t>(head_dim * terms);
}

struct MatrixTile {
  const std::uint16_t* key = nullptr;
  const std::uint16_t* value = nullptr;
  const std::uint64_t* mask = nullptr;  // [rows] visible tokens, bit t = token t
};

struct MatrixState {
  const std::uint16_t* query = nullptr;
  // [rows] score = scale * (query . key) + offset; softcap follows.
  const float* scale = nullptr;
  const float* offset = nullptr;
  float* max = nullptr;  // [rows], -inf at first
  float* sum = nullptr;  // [rows], 0 at first
  float* out = nullptr;  // [rows][head_dim], 0 at first; unnormalised
  int rows = 0;          // a multiple of kMatrixRows
  int head_dim = 0;      // a multiple of 32
  int query_terms = 1;   // 1 or 2, as are the others
  int key_terms = 1;
  int value_terms = 1;
  int probability_terms = 1;
  float softcap = 0.0F;
};

// What `begin` found and `end` restores.
struct MatrixSaved {
  alignas(64) unsigned char config[64] = {};
  unsigned control = 0;
};

struct MatrixKernels {
  // Online softmax over `count` (1..kMatrixTiles) tiles. A row's result does not depend on the
  // other rows. The calling thread must be between `begin` and `end`.
  void (*attend)(const MatrixTile* tiles, int count, const MatrixState& state);
  // in[rows][head_dim] -> left operand; rows from `rows` to the padded count are zero. Each row is
  // divided by a power of two, which goes to unit[row], so that no term overflows.
  void (*pack_query)(const float* in, int rows, int head_dim, int terms, std::uint16_t* out,
                     float* unit);
  // in[depth][columns], multiples of 32 and 16 -> right operand.
  void (*pack_right)(const float* in, int depth, int columns, int terms, std::uint16_t* out);
  // A whole tile of a tiled page (kQuad order) -> right operands of one term, in the space it is
  // stored in, without outer scales.
  void (*unpack_tile)(Format format, int head_dim, const std::uint8_t* tile, std::uint16_t* key,
                      std::uint16_t* value);
  // hadamard() of each row.
  void (*rotate)(float* rows, int count, int head_dim);
  // Configure and release the unit for this thread; what another library had configured is kept.
  void (*begin)(MatrixSaved*);
  void (*end)(MatrixSaved*);
};

// Whether this machine has AMX with BF16 and lets this process use it (asks the kernel once).
bool amx_usable();
// Null where the build has none.
const MatrixKernels* amx_kernels();

}  // namespace bitdecoding::cpu
