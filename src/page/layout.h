// SPDX-License-Identifier: Apache-2.0
// Where every nibble and scale byte of a page is: the one home of the layout. docs/format.md shows
// the same map with test vectors.
//
// One KV head of a page is page_size / 64 tiles of 64 tokens. A tile is, in this order,
//   tiled formats  K codes, K scales, V codes, V scales
//   row formats    K rows (then K scales for kNvfp4Rows), V rows (then V scales); 64 rows each
//
// Tiled: a fragment is 16 rows x 64 columns of codes, 512 bytes. K fragments are indexed
// [row group 0..3][column block 0..ceil(head_dim / 64)): rows are tokens, columns are dims (columns
// past head_dim hold code 0 and scale 0). V fragments are indexed [dim group 0..head_dim / 16):
// rows are dims, columns are the tile's 64 tokens in order. Each fragment has 16 rows x `kBlocks`
// scale bytes; kBlocks = 4 (blocks of 16 columns) for NVFP4 and 2 (blocks of 32) for MXFP4.
//
// kFp4Mma inside a fragment: byte 16 * (4 g + t) + 4 w + b, lane g = row % 8, t, word
// w = row / 8 + 2 * (column / 32), column % 32 = 8 t + c; c = 2 i is nibble i and c = 2 i + 1 is
// nibble i + 4 of the word. Scales: byte kBlocks * row + block.
// kFp16Mma inside a fragment: kFp4Mma's words, columns in natural order (c = 0..7), byte j of the
// word holding codes j and j + 4: code j at bits 7, 3, 2, 1 (sign first), code j + 4 at bits 6, 5,
// 4, 0. One mask leaves code j as E5M2, which is FP16's upper byte: the value times 2^-14. Scales:
// row r = g + 8 up, NVFP4 block b = 2 half + h is byte 4 * (2 g + h) + 2 up + half, MXFP4 block
// half is byte 4 g + 2 up + half: one word a lane. kQuad inside a fragment: rows are renamed to
// `rank` (order of the tokens; dims unchanged); byte 64 * (column / 8) + 4 * rank + column % 4, low
// nibble for column % 8 < 4. Scales: byte 16 * block + rank.
#pragma once

#include <cstdint>

#include "bitdecoding/format.h"
#include "numeric/portable.h"

namespace bitdecoding::layout {

inline constexpr int kFragmentBytes = 512;
inline constexpr int kFragmentRows = 16;
inline constexpr int kFragmentColumns = 64;

struct Nibble {
  std::int64_t byte;
  int shift;            // 0 or 4
  bool spread = false;  // kFp16Mma: bits 7, 3, 2, 1 (shift 0) or 6, 5, 4, 0 (shift 4) of the byte
};

BD_HOST_DEVICE constexpr std::uint8_t take_code(std::uint8_t byte, Nibble n) {
  if (!n.spread) return static_cast<std::uint8_t>((byte >> n.shift) & 15);
  return static_cast<std::uint8_t>(n.shift == 0 ? ((byte >> 4) & 8) | ((byte >> 1) & 7)
                                                : ((byte >> 3) & 14) | (byte & 1));
}

// `byte` with the code at its place; the other code is left alone.
BD_HOST_DEVICE constexpr std::uint8_t put_code(std::uint8_t byte, Nibble n, std::uint8_t code) {
  if (!n.spread) {
    return static_cast<std::uint8_t>((byte & (0xF0 >> n.shift)) | (code << n.shift));
  }
  return static_cast<std::uint8_t>(n.shift == 0
                                       ? (byte & 0x71) | ((code & 8) << 4) | ((code & 7) << 1)
                                       : (byte & 0x8E) | ((code & 14) << 3) | (code & 1));
}

BD_HOST_DEVICE constexpr int scale_blocks_per_row(Format f) { return f == Format::kMxfp4 ? 2 : 4; }
BD_HOST_DEVICE constexpr int fragment_scale_bytes(Format f) {
  return kFragmentRows * scale_blocks_per_row(f);
}
BD_HOST_DEVICE constexpr int key_column_blocks(int head_dim) { return (head_dim + 63) / 64; }
BD_HOST_DEVICE constexpr int value_dim_groups(int head_dim) { return head_dim / 16; }

// ---- offsets of the four parts of a tile -------------------------------------------------------

struct TileParts {
  std::int64_t key_codes, key_scales, value_codes, value_scales, bytes;
};

BD_HOST_DEVICE constexpr TileParts tile_parts(Format f, int head_dim) {
  std::int64_t key_code_bytes = 0;
  std::int64_t key_scale_bytes = 0;
  std::int64_t value_code_bytes = 0;
  std::int64_t value_scale_bytes = 0;
  switch (f) {
    case Format::kBf16:
      key_code_bytes = value_code_bytes = std::int64_t{kTileTokens} * head_dim * 2;
      break;
    case Format::kFp8E4m3:
      key_code_bytes = value_code_bytes = std::int64_t{kTileTokens} * head_dim;
      break;
    case Format::kNvfp4Rows:
      key_code_bytes = value_code_bytes = std::int64_t{kTileTokens} * head_dim / 2;
      key_scale_bytes = value_scale_bytes = std::int64_t{kTileTokens} * head_dim / 16;
      break;
    case Format::kNvfp4:
    case Format::kMxfp4: {
      const std::int64_t key_fragments = std::int64_t{4} * key_column_blocks(head_dim);
      const std::int64_t value_fragments = value_dim_groups(head_dim);
      key_code_bytes = key_fragments * kFragmentBytes;
      key_scale_bytes = key_fragments * fragment_scale_bytes(f);
      value_code_bytes = value_fragments * kFragmentBytes;
      value_scale_bytes = value_fragments * fragment_scale_bytes(f);
      break;
    }
  }
  const std::int64_t key_scales = key_code_bytes;
  const std::int64_t value_codes = key_scales + key_scale_bytes;
  const std::int64_t value_scales = value_codes + value_code_bytes;
  return {0, key_scales, value_codes, value_scales, value_scales + value_scale_bytes};
}

// ---- inside a fragment -------------------------------------------------------------------------

// K: tile token (0..63) -> row group and row of the MMA. With this map the scores' accumulator,
// transposed, is the P operand of P.V without a shuffle.
BD_HOST_DEVICE constexpr int key_row_group(int token) { return 2 * (token / 32) + (token % 8) / 4; }
BD_HOST_DEVICE constexpr int key_mma_row(int token) {
  const int t = (token % 32) / 8;
  const int j = token % 8;
  return 2 * t + (j & 1) + 8 * ((j >> 1) & 1);
}
// kQuad's name of the same row: the group's 16 tokens in ascending order.
BD_HOST_DEVICE constexpr int key_quad_rank(int token) { return 4 * ((token % 32) / 8) + token % 4; }

BD_HOST_DEVICE constexpr Nibble fragment_code(FragmentOrder order, int row, int column) {
  if (order != FragmentOrder::kQuad) {
    const int lane = 4 * (row % 8) + (column % 32) / 8;
    const int word = row / 8 + 2 * (column / 32);
    const int c = column % 8;
    if (order == FragmentOrder::kFp16Mma) return {16 * lane + 4 * word + c % 4, c & 4, true};
    const int nibble = c / 2 + 4 * (c % 2);
    return {16 * lane + 4 * word + nibble / 2, 4 * (nibble % 2)};
  }
  return {64 * (column / 8) + 4 * row + column % 4, column % 8 < 4 ? 0 : 4};
}

BD_HOST_DEVICE constexpr int fragment_scale(FragmentOrder order, Format f, int row, int block) {
  const int blocks = scale_blocks_per_row(f);
  if (order == FragmentOrder::kFp4Mma) return blocks * row + block;
  if (order == FragmentOrder::kQuad) return kFragmentRows * block + row;
  const int per_half = blocks / 2;  // a half is 32 columns
  return 4 * (per_half * (row % 8) + block % per_half) + 2 * (row / 8) + block / per_half;
}

// ---- inside a tile, tiled formats --------------------------------------------------------------

BD_HOST_DEVICE constexpr int key_row(FragmentOrder order, int token) {
  return order == FragmentOrder::kQuad ? key_quad_rank(token) : key_mma_row(token);
}

BD_HOST_DEVICE constexpr Nibble key_code(Format f, FragmentOrder order, int head_dim, int token,
                                         int dim) {
  const int fragment = key_row_group(token) * key_column_blocks(head_dim) + dim / 64;
  const Nibble n = fragment_code(order, key_row(order, token), dim % 64);
  return {tile_parts(f, head_dim).key_codes + std::int64_t{fragment} * kFragmentBytes + n.byte,
          n.shift, n.spread};
}

BD_HOST_DEVICE constexpr std::int64_t key_scale(Format f, FragmentOrder order, int head_dim,
                                                int token, int dim) {
  const int fragment = key_row_group(token) * key_column_blocks(head_dim) + dim / 64;
  const int block = (dim % 64) / (64 / scale_blocks_per_row(f));
  return tile_parts(f, head_dim).key_scales + std::int64_t{fragment} * fragment_scale_bytes(f) +
         fragment_scale(order, f, key_row(order, token), block);
}

BD_HOST_DEVICE constexpr Nibble value_code(Format f, FragmentOrder order, int head_dim, int token,
                                           int dim) {
  const Nibble n = fragment_code(order, dim % 16, token);
  return {tile_parts(f, head_dim).value_codes + std::int64_t{dim / 16} * kFragmentBytes + n.byte,
          n.shift, n.spread};
}

BD_HOST_DEVICE constexpr std::int64_t value_scale(Format f, FragmentOrder order, int head_dim,
                                                  int token, int dim) {
  const int block = token / (64 / scale_blocks_per_row(f));
  return tile_parts(f, head_dim).value_scales + std::int64_t{dim / 16} * fragment_scale_bytes(f) +
         fragment_scale(order, f, dim % 16, block);
}

// ---- inside a tile, row formats ----------------------------------------------------------------
// Byte of element (token, dim) of the K (side 0) or V (side 1) part; kNvfp4Rows: dim 2i is the low
// nibble of its byte, dim 2i + 1 the high one.

BD_HOST_DEVICE constexpr std::int64_t row_element(Format f, int head_dim, int side, int token,
                                                  int dim) {
  const TileParts parts = tile_parts(f, head_dim);
  const std::int64_t base = side == 0 ? parts.key_codes : parts.value_codes;
  const std::int64_t index = std::int64_t{token} * head_dim + dim;
  return base + (f == Format::kBf16 ? 2 * index : (f == Format::kNvfp4Rows ? index / 2 : index));
}

BD_HOST_DEVICE constexpr std::int64_t row_scale(Format f, int head_dim, int side, int token,
                                                int dim) {
  const TileParts parts = tile_parts(f, head_dim);
  return (side == 0 ? parts.key_scales : parts.value_scales) +
         std::int64_t{token} * (head_dim / 16) + dim / 16;
}

}  // namespace bitdecoding::layout
