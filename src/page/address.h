// SPDX-License-Identifier: Apache-2.0
// Addresses inside one KV head of a page, for any format and order: layout.h's tile map plus the
// tile's own offset. One element at a time; SIMD code walks fragments instead.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "bitdecoding/page.h"
#include "numeric/bf16.h"
#include "page/layout.h"
#include "scale/rules.h"

namespace bitdecoding {

enum class Side : int { kKey = 0, kValue = 1 };

// Row `row` (0 .. page_size - 1), channel `dim`. Formats with 4-bit codes only.
inline layout::Nibble code_address(const PageGeometry& g, Side side, int row, int dim) {
  const std::int64_t tile = row / kTileTokens * g.tile_bytes;
  const int token = row % kTileTokens;
  if (g.format == Format::kNvfp4Rows) {
    return {tile + layout::row_element(g.format, g.head_dim, static_cast<int>(side), token, dim),
            4 * (dim % 2)};
  }
  layout::Nibble n = side == Side::kKey
                         ? layout::key_code(g.format, g.order, g.head_dim, token, dim)
                         : layout::value_code(g.format, g.order, g.head_dim, token, dim);
  n.byte += tile;
  return n;
}

// Formats with scales only.
inline std::int64_t scale_address(const PageGeometry& g, Side side, int row, int dim) {
  const std::int64_t tile = row / kTileTokens * g.tile_bytes;
  const int token = row % kTileTokens;
  if (g.format == Format::kNvfp4Rows) {
    return tile + layout::row_scale(g.format, g.head_dim, static_cast<int>(side), token, dim);
  }
  return tile + (side == Side::kKey
                     ? layout::key_scale(g.format, g.order, g.head_dim, token, dim)
                     : layout::value_scale(g.format, g.order, g.head_dim, token, dim));
}

// First byte of an element of kFp8E4m3 and kBf16.
inline std::int64_t element_address(const PageGeometry& g, Side side, int row, int dim) {
  return row / kTileTokens * g.tile_bytes +
         layout::row_element(g.format, g.head_dim, static_cast<int>(side), row % kTileTokens, dim);
}

inline std::uint8_t get_nibble(const std::uint8_t* head, layout::Nibble n) {
  return layout::take_code(head[n.byte], n);
}

inline void set_nibble(std::uint8_t* head, layout::Nibble n, std::uint8_t code) {
  head[n.byte] = layout::put_code(head[n.byte], n, code);
}

// K columns of a tiled page, those past head_dim included.
inline int padded_key_dims(const PageGeometry& g) {
  return is_tiled(g.format) ? layout::key_column_blocks(g.head_dim) * 64 : g.head_dim;
}

// The stored value of an element: of K still shifted and rotated. A corrupt scale byte gives NaN
// and is counted.
inline float read_element(const PageGeometry& g, const std::uint8_t* head, Side side, int row,
                          int dim, float outer_scale, std::uint64_t* corrupt) {
  if (g.format == Format::kBf16) {
    const std::uint8_t* at = head + element_address(g, side, row, dim);
    return decode_bf16(static_cast<std::uint16_t>(at[0] | (at[1] << 8)));
  }
  if (g.format == Format::kFp8E4m3) {
    return decode_e4m3(head[element_address(g, side, row, dim)]);
  }
  const std::uint8_t scale = head[scale_address(g, side, row, dim)];
  if (is_corrupt_scale(g.format, scale)) {
    ++*corrupt;
    return std::numeric_limits<float>::quiet_NaN();
  }
  return decode_e2m1(get_nibble(head, code_address(g, side, row, dim))) *
         (decode_scale(g.format, scale) * outer_scale);
}

}  // namespace bitdecoding
