// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/gather.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "backend/cpu/corrupt_tile.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/tile_source.h"
#include "backend/cpu/value_shift.h"

namespace bitdecoding::cpu {

Status cpu_gather(const AttendParams& params, const AttendKernels& kernels, int request,
                  int kv_head, std::int64_t begin, std::int64_t end, float* key, float* value) {
  const RequestRows rows(params, params.plan->requests[request]);
  const TileSource source(params, kernels, rows, kv_head);
  const int head_dim = params.layer->geometry.head_dim;
  const auto buffer = std::make_unique<FloatTileBuffer>();
  const float* shift = value_shift_of(*params.layer, kv_head);
  for (std::int64_t position = begin; position < end;) {
    const std::int64_t tile = position / kTileTokens;
    const std::int64_t tile_end = std::min(end, (tile + 1) * kTileTokens);
    if (source.page_tile(tile) == nullptr) {
      return {StatusCode::kOutOfRange,
              fmt::format("request {}: the block table has no page of the cache for position {}",
                          request, position)};
    }
    count_corrupt(params, source.load_page_tile(tile, TileSpace::kOriginal, buffer.get()));
    for (; position < tile_end; ++position) {
      const std::int64_t token = position % kTileTokens;
      float* k = key + (position - begin) * head_dim;
      for (int d = 0; d < head_dim; ++d) k[d] = buffer->key[d * kTileTokens + token];
      float* v = value + (position - begin) * head_dim;
      for (int d = 0; d < head_dim; ++d) {
        v[d] = buffer->value[token * head_dim + d];
        if (shift != nullptr) v[d] = v[d] + shift[d];
      }
    }
  }
  return {};
}

}  // namespace bitdecoding::cpu
