// SPDX-License-Identifier: Apache-2.0
#include "page_stats.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numeric/bf16.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "page/layout.h"

namespace bitdecoding::cli {
namespace {

bool is_fp4(Format f) { return scale_block(f) > 0; }

std::uint8_t code_at(const PageGeometry& g, const std::uint8_t* tile, int side, int token,
                     int dim) {
  if (g.format == Format::kNvfp4Rows) {
    const std::uint8_t byte = tile[layout::row_element(g.format, g.head_dim, side, token, dim)];
    return dim % 2 == 0 ? byte & 0xF : byte >> 4;
  }
  const layout::Nibble n = side == 0
                               ? layout::key_code(g.format, g.order, g.head_dim, token, dim)
                               : layout::value_code(g.format, g.order, g.head_dim, token, dim);
  return layout::take_code(tile[n.byte], n);
}

std::uint8_t scale_at(const PageGeometry& g, const std::uint8_t* tile, int side, int token,
                      int dim) {
  if (g.format == Format::kNvfp4Rows) {
    return tile[layout::row_scale(g.format, g.head_dim, side, token, dim)];
  }
  return tile[side == 0 ? layout::key_scale(g.format, g.order, g.head_dim, token, dim)
                        : layout::value_scale(g.format, g.order, g.head_dim, token, dim)];
}

// True for one value of each scale block: its first.
bool begins_block(const PageGeometry& g, int side, int token, int dim) {
  const int block = scale_block(g.format);
  const bool along_tokens = side == 1 && is_tiled(g.format);
  return (along_tokens ? token : dim) % block == 0;
}

void count_fp4(const PageGeometry& g, const std::uint8_t* tile, int side, int token, int dim,
               SideStats* stats) {
  const std::uint8_t magnitude = code_at(g, tile, side, token, dim) & 7;
  stats->zeros += magnitude == 0;
  stats->largest += magnitude == 7;
  if (!begins_block(g, side, token, dim)) return;
  const std::uint8_t scale_code = scale_at(g, tile, side, token, dim);
  const float scale =
      g.format == Format::kMxfp4 ? decode_e8m0(scale_code) : decode_e4m3(scale_code);
  ++stats->blocks;
  if (scale == 0.0F) {
    ++stats->zero_blocks;
    return;
  }
  const bool first = stats->blocks - stats->zero_blocks == 1;
  stats->min_scale = first ? scale : std::min(stats->min_scale, scale);
  stats->max_scale = std::max(stats->max_scale, scale);
}

void count_row(const PageGeometry& g, const std::uint8_t* tile, int side, int token, int dim,
               SideStats* stats) {
  const std::uint8_t* at = tile + layout::row_element(g.format, g.head_dim, side, token, dim);
  float value = 0;
  if (g.format == Format::kBf16) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, at, 2);
    value = decode_bf16(bits);
  } else {
    value = decode_e4m3(*at);
    stats->largest += std::abs(value) == kE4m3Max;
  }
  stats->zeros += value == 0.0F;
  stats->non_finite += !std::isfinite(value);
}

double percent(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

SideStats page_stats(const PageGeometry& geometry, std::span<const std::uint8_t> head, int side) {
  SideStats stats;
  for (int position = 0; position < geometry.page_size; ++position) {
    const std::uint8_t* tile = head.data() + position / kTileTokens * geometry.tile_bytes;
    for (int dim = 0; dim < geometry.head_dim; ++dim) {
      ++stats.values;
      if (is_fp4(geometry.format)) {
        count_fp4(geometry, tile, side, position % kTileTokens, dim, &stats);
      } else {
        count_row(geometry, tile, side, position % kTileTokens, dim, &stats);
      }
    }
  }
  return stats;
}

nlohmann::ordered_json to_json(const SideStats& stats) {
  return {{"values", stats.values},       {"zeros", stats.zeros},
          {"largest", stats.largest},     {"non_finite", stats.non_finite},
          {"blocks", stats.blocks},       {"zero_blocks", stats.zero_blocks},
          {"min_scale", stats.min_scale}, {"max_scale", stats.max_scale}};
}

std::string in_words(const SideStats& stats, Format format) {
  std::string text = fmt::format("{} values, {:.1f} % of them zero", stats.values,
                                 percent(stats.zeros, stats.values));
  if (is_fp4(format)) {
    text += fmt::format(
        ", {:.1f} % of the largest code; {} block scales from {:.4g} to {:.4g}, and {} blocks of "
        "scale zero",
        percent(stats.largest, stats.values), stats.blocks - stats.zero_blocks, stats.min_scale,
        stats.max_scale, stats.zero_blocks);
  }
  if (stats.non_finite > 0) text += fmt::format("; {} NaN or infinite", stats.non_finite);
  return text;
}

}  // namespace bitdecoding::cli
