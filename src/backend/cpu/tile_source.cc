// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/tile_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cpu/query.h"
#include "backend/tensor.h"
#include "numeric/bf16.h"

namespace bitdecoding::cpu {

void clear_unseen_values(std::uint64_t seen, int head_dim, FloatTileBuffer* tile) {
  if (seen == ~std::uint64_t{0}) return;
  for (int token = 0; token < kTileTokens; ++token) {
    if (((seen >> token) & 1U) != 0) continue;
    std::fill_n(tile->value + std::int64_t{token} * head_dim, head_dim, 0.0F);
  }
}

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

int TileSource::load_page_tile(std::int64_t tile, TileSpace space, FloatTileBuffer* buffer) const {
  const LayerConfig& layer = *params_.layer;
  const PageGeometry& geometry = layer.geometry;
  DequantizeArgs args;
  args.format = geometry.format;
  args.head_dim = geometry.head_dim;
  args.tile = page_tile(tile);
  args.valid_tokens = static_cast<int>(
      std::min<std::int64_t>(kTileTokens, rows_.request().seq_len - tile * kTileTokens));
  args.hadamard = false;
  if (space == TileSpace::kOriginal) {
    args.hadamard = layer.hadamard;
    if (layer.key_shift != nullptr) {
      args.key_shift = layer.key_shift + static_cast<std::int64_t>(kv_head_) * geometry.head_dim;
    }
    args.key_outer = outer_scale(layer.key_outer, kv_head_);
    args.value_outer = outer_scale(layer.value_outer, kv_head_);
  }
  args.key = buffer->key;
  args.value = buffer->value;
  return kernels_.dequantize->tile(args);
}

// A row of the step as attend sees it: in reproducible mode what a shadow slot would hold.
void TileSource::load_tensor_row(const TensorView& tensor, std::int64_t row, float* out) const {
  const int head_dim = params_.layer->geometry.head_dim;
  if (tensor.dtype == DType::kBf16) {
    const auto* in = static_cast<const std::uint16_t*>(tensor.data) + row * tensor.stride_token +
                     kv_head_ * tensor.stride_head;
    kernels_.tile->bf16_to_float(in, out, head_dim);
  } else {
    load_row(tensor, row, kv_head_, head_dim, out);
  }
  kernels_.tile->clean(out, head_dim);
  if (!params_.plan->rule.reproducible) return;
  for (int d = 0; d < head_dim; ++d) out[d] = round_to_bf16(out[d]);
}

void TileSource::load_chunk_rows(std::int64_t base, FloatTileBuffer* buffer) const {
  const int head_dim = params_.layer->geometry.head_dim;
  const RequestPlan& request = rows_.request();
  const std::int64_t begin = std::max(base, rows_.chunk_begin());
  const std::int64_t end = std::min(base + kTileTokens, request.seq_len);
  for (std::int64_t p = begin; p < end; ++p) {
    const std::int64_t row = request.query_begin + (p - rows_.chunk_begin());
    load_tensor_row(params_.key, row, buffer->rows + (p - base) * head_dim);
    load_tensor_row(params_.value, row, buffer->value + (p - base) * head_dim);
  }
}

void TileSource::load_bf16_tile(std::int64_t tile, std::uint64_t available,
                                FloatTileBuffer* buffer) const {
  const LayerConfig& layer = *params_.layer;
  const int head_dim = layer.geometry.head_dim;
  const int group_tokens = layer.geometry.group_tokens;
  const std::int64_t base = tile * kTileTokens;
  if (available != ~std::uint64_t{0}) {
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(head_dim) * kTileTokens;
    std::memset(buffer->rows, 0, bytes);
    std::memset(buffer->value, 0, bytes);
  }
  const RequestPlan& request = rows_.request();
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
      kernels_.tile->bf16_to_float(k, buffer->rows + (p - base) * head_dim, head_dim);
      kernels_.tile->bf16_to_float(v, buffer->value + (p - base) * head_dim, head_dim);
    }
  }
  if (rows_.reads_chunk()) load_chunk_rows(base, buffer);
  kernels_.tile->transpose_keys(buffer->rows, head_dim, buffer->key);
}

}  // namespace bitdecoding::cpu
