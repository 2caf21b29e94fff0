// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/tile_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cpu/query.h"
#include "backend/tensor.h"
#include "numeric/bf16.h"

namespace bitdecoding::cpu {
namespace {

void store_key_column(const float* key, int head_dim, int token, FloatTileBuffer* buffer) {
  for (int d = 0; d < head_dim; ++d) buffer->key[d * kTileTokens + token] = key[d];
}

// A row of the step as attend sees it: in reproducible mode what a shadow slot would hold.
void clean_row(float* row, int n, bool round) {
  for (int d = 0; d < n; ++d) {
    const float x = attendable(row[d]);
    row[d] = round ? round_to_bf16(x) : x;
  }
}

}  // namespace

const std::uint8_t* TileSource::page_tile(std::int64_t tile) const {
  const PageGeometry& geometry = params_.layer->geometry;
  const std::int64_t tiles_per_page = geometry.page_size / kTileTokens;
  const std::int64_t index = tile / tiles_per_page;
  const RequestPlan& request = rows_.request();
  if (index >= request.num_pages) return nullptr;
  const std::int64_t page = request.pages[index];
  if (page < 0 || page >= params_.cache.num_pages) return nullptr;
  return params_.cache.pages + page * params_.cache.stride_page +
         kv_head_ * params_.cache.stride_head + (tile % tiles_per_page) * geometry.tile_bytes;
}

int TileSource::load_page_tile(std::int64_t tile, FloatTileBuffer* buffer) const {
  const LayerConfig& layer = *params_.layer;
  const PageGeometry& geometry = layer.geometry;
  DequantizeArgs args;
  args.format = geometry.format;
  args.head_dim = geometry.head_dim;
  args.tile = page_tile(tile);
  args.valid_tokens = static_cast<int>(
      std::min<std::int64_t>(kTileTokens, rows_.request().seq_len - tile * kTileTokens));
  args.hadamard = layer.hadamard;
  args.key_shift = layer.key_shift == nullptr
                       ? nullptr
                       : layer.key_shift + static_cast<std::int64_t>(kv_head_) * geometry.head_dim;
  args.key_outer = layer.key_outer == nullptr ? 1.0F : std::ldexp(1.0F, layer.key_outer[kv_head_]);
  args.value_outer =
      layer.value_outer == nullptr ? 1.0F : std::ldexp(1.0F, layer.value_outer[kv_head_]);
  args.key = buffer->key;
  args.value = buffer->value;
  return kernels_.dequantize->tile(args);
}

void TileSource::load_chunk_rows(std::int64_t base, FloatTileBuffer* buffer) const {
  const int head_dim = params_.layer->geometry.head_dim;
  const RequestPlan& request = rows_.request();
  const bool round = params_.plan->rule.reproducible;
  const std::int64_t begin = std::max(base, rows_.chunk_begin());
  const std::int64_t end = std::min(base + kTileTokens, request.seq_len);
  float key[kMaxHeadDim];
  for (std::int64_t p = begin; p < end; ++p) {
    const std::int64_t row = request.query_begin + (p - rows_.chunk_begin());
    const int token = static_cast<int>(p - base);
    float* value = buffer->value + static_cast<std::int64_t>(token) * head_dim;
    load_row(params_.key, row, kv_head_, head_dim, key);
    load_row(params_.value, row, kv_head_, head_dim, value);
    clean_row(key, head_dim, round);
    clean_row(value, head_dim, round);
    store_key_column(key, head_dim, token, buffer);
  }
}

void TileSource::load_bf16_tile(std::int64_t tile, std::uint64_t available,
                                FloatTileBuffer* buffer) const {
  const LayerConfig& layer = *params_.layer;
  const int head_dim = layer.geometry.head_dim;
  const int group_tokens = layer.geometry.group_tokens;
  const std::int64_t base = tile * kTileTokens;
  if (available != ~std::uint64_t{0}) {
    std::memset(buffer->key, 0, sizeof(float) * static_cast<std::size_t>(head_dim) * kTileTokens);
    std::memset(buffer->value, 0, sizeof(float) * static_cast<std::size_t>(head_dim) * kTileTokens);
  }
  const RequestPlan& request = rows_.request();
  float key[kMaxHeadDim];
  for (std::int64_t i = 0; i < request.num_spans; ++i) {
    const ShadowSpan& span = request.spans[i];
    const std::int64_t begin = std::max(base, span.begin);
    const std::int64_t end = std::min(base + kTileTokens, span.end);
    for (std::int64_t p = begin; p < end; ++p) {
      // Slot layout: [num_kv_heads][K, V][group_tokens][head_dim].
      const std::int64_t row = span.row + (p - span.begin);
      const std::int64_t slot_head =
          static_cast<std::int64_t>(span.slot) * layer.num_kv_heads + kv_head_;
      const std::uint16_t* k =
          params_.shadow.rows + (2 * slot_head * group_tokens + row) * head_dim;
      const std::uint16_t* v = k + static_cast<std::int64_t>(group_tokens) * head_dim;
      const int token = static_cast<int>(p - base);
      kernels_.tile->bf16_to_float(k, key, head_dim);
      store_key_column(key, head_dim, token, buffer);
      kernels_.tile->bf16_to_float(v, buffer->value + static_cast<std::int64_t>(token) * head_dim,
                                   head_dim);
    }
  }
  if (rows_.reads_chunk()) load_chunk_rows(base, buffer);
}

}  // namespace bitdecoding::cpu
