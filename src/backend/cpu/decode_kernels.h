// SPDX-License-Identifier: Apache-2.0
// Decode attention over the FP4 pages of one KV head for a few query rows: the kernel's arguments.
//
// Cost model (docs/design/cpu.md): a tile of 64 tokens costs 2 * 64 * head_dim byte multiply-adds a
// row and term, 32 (AVX2) or 64 (AVX-512) an instruction, plus one addition each and an eighth as
// many scale multiplications; unpacking a tile's nibbles is shared by the rows. Bytes: tile_bytes a
// tile.
#pragma once

#include <cstdint>

#include "bitdecoding/format.h"

namespace bitdecoding::cpu {

inline constexpr int kMaxWork = 8;  // DecodeKernels::max_work of any target

// Query rows, made ready once and used for every tile. "work" w = row * terms + term.
struct DecodeQuery {
  int rows = 0;
  int terms = 0;  // 1: int8; 2: `wide`, 14 bits and a sign. rows * terms <= max_work
  const std::int32_t* quads = nullptr;  // [key_column_blocks * 16][work] four int8 each
  const std::int32_t* bias = nullptr;   // [key_column_blocks * 4][work] low int16: -12 * sum(q)
  const float* scale = nullptr;   // [rows] of the integers, everything that is constant included
  const float* offset = nullptr;  // [rows] added to every score: sm_scale * q . key_shift
  // What DecodeKernels::widen_query wrote, 64-byte aligned; null: the kernel makes it for every
  // tile.
  const std::uint8_t* wide = nullptr;
};

// The partial result of a range of tokens; initialised by the caller to m = -inf, l = 0, out = 0.
struct DecodeState {
  float* max = nullptr;  // [rows]
  float* sum = nullptr;  // [rows], relative to max
  float* out = nullptr;  // [rows][head_dim], unnormalised
};

struct DecodeTile {
  const std::uint8_t* tile = nullptr;
  const std::uint8_t* prefetch = nullptr;  // the next tile, or null
  // Visible tokens of each row, bit t = token t; ignored when `full`.
  std::uint64_t mask[kMaxWork] = {};
  bool full = true;
};

struct DecodeContext {
  Format format = Format::kNvfp4;
  int head_dim = 0;
  float softcap = 0.0F;
  float value_unit = 1.0F;  // the outer scale of V
};

struct DecodeKernels {
  int max_work;  // rows times terms in one pass
  void (*tile)(const DecodeContext&, const DecodeQuery&, const DecodeTile&, const DecodeState&);
  // Scale bytes of the tile that are NaN.
  int (*count_nan_scales)(const DecodeContext&, const std::uint8_t* tile);
  // The query's bytes broadcast over vectors, made once for all tiles; 0 bytes where unused.
  std::int64_t (*wide_query_bytes)(int head_dim, int work);
  void (*widen_query)(int head_dim, const DecodeQuery&, std::uint8_t* out);
};

// Kernels of a Highway target that this build contains; null otherwise.
const DecodeKernels* decode_kernels(std::int64_t target);

}  // namespace bitdecoding::cpu
