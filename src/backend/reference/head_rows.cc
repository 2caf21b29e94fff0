// SPDX-License-Identifier: Apache-2.0
#include "backend/reference/head_rows.h"

#include "backend/reference/verbs.h"
#include "backend/tensor.h"
#include "page/address.h"
#include "transform/hadamard.h"

namespace bitdecoding::reference {

HeadRows::HeadRows(const AttendParams& params, const RequestPlan& request, int kv_head)
    : params_(params),
      request_(request),
      kv_head_(kv_head),
      rows_(static_cast<std::size_t>(request.seq_len * 2 * params.layer->geometry.head_dim)),
      done_(static_cast<std::size_t>(request.seq_len)) {}

const float* HeadRows::page_row(std::int64_t position, int side) {
  const LayerConfig& layer = *params_.layer;
  const PageGeometry& g = layer.geometry;
  float* rows = rows_.data() + position * 2 * g.head_dim;
  if (done_[static_cast<std::size_t>(position)] == 0) {
    done_[static_cast<std::size_t>(position)] = 1;
    const std::int64_t page = request_.pages[position / g.page_size];
    const std::uint8_t* head = page_head(params_.cache, page, kv_head_);
    const auto row = static_cast<int>(position % g.page_size);
    const float key_outer = outer_scale(layer.key_outer, kv_head_);
    const float value_outer = outer_scale(layer.value_outer, kv_head_);
    for (int dim = 0; dim < g.head_dim; ++dim) {
      rows[dim] = read_element(g, head, Side::kKey, row, dim, key_outer, &corrupt_);
      rows[g.head_dim + dim] =
          read_element(g, head, Side::kValue, row, dim, value_outer, &corrupt_);
    }
  }
  return rows + std::int64_t{side} * g.head_dim;
}

void HeadRows::bf16_row(const Segment& segment, std::int64_t position, int side,
                        double* out) const {
  const LayerConfig& layer = *params_.layer;
  const std::int64_t offset = position - segment.begin;
  const TensorView& tensor = side == 0 ? params_.key : params_.value;
  for (int dim = 0; dim < layer.geometry.head_dim; ++dim) {
    if (segment.source == Source::kShadow) {
      const std::int64_t row = shadow_row_index(layer, segment.slot, kv_head_, side,
                                                segment.slot_row + static_cast<int>(offset));
      out[dim] = decode_bf16(params_.shadow.rows[row + dim]);
      continue;
    }
    const float raw = load_element(tensor, segment.token_row + offset, kv_head_, dim);
    std::uint64_t non_finite = 0;
    out[dim] = segment.source == Source::kChunk ? attendable(raw) : storable(raw, &non_finite);
  }
}

void gather(const AttendParams& params, const RequestPlan& request, int kv_head, std::int64_t begin,
            std::int64_t end, float* key, float* value) {
  const LayerConfig& layer = *params.layer;
  const PageGeometry& g = layer.geometry;
  std::uint64_t corrupt = 0;
  for (std::int64_t p = begin; p < end; ++p) {
    float* key_row = key + (p - begin) * g.head_dim;
    float* value_row = value + (p - begin) * g.head_dim;
    const std::uint8_t* head = page_head(params.cache, request.pages[p / g.page_size], kv_head);
    const auto row = static_cast<int>(p % g.page_size);
    for (int dim = 0; dim < g.head_dim; ++dim) {
      key_row[dim] = read_element(g, head, Side::kKey, row, dim,
                                  outer_scale(layer.key_outer, kv_head), &corrupt);
      value_row[dim] = read_element(g, head, Side::kValue, row, dim,
                                    outer_scale(layer.value_outer, kv_head), &corrupt);
    }
    if (!is_tiled(g.format)) continue;
    if (layer.hadamard) hadamard(key_row, g.head_dim);
    for (int dim = 0; dim < g.head_dim && layer.key_shift != nullptr; ++dim) {
      key_row[dim] = key_row[dim] + layer.key_shift[std::int64_t{kv_head} * g.head_dim + dim];
    }
    for (int dim = 0; dim < g.head_dim && layer.value_shift != nullptr; ++dim) {
      value_row[dim] = value_row[dim] + layer.value_shift[std::int64_t{kv_head} * g.head_dim + dim];
    }
  }
  if (params.corrupt_scales != nullptr) add_relaxed(params.corrupt_scales, corrupt);
}

}  // namespace bitdecoding::reference
