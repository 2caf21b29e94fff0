// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/attend_scratch.h"

#include <algorithm>

#include "backend/cpu/matrix_kernels.h"
#include "backend/cpu/rows.h"

namespace bitdecoding::cpu {
namespace {

ItemKind page_kind(const AttendParams& params, const RequestRows& rows, bool matrix) {
  const bool tiled = is_tiled(params.layer->geometry.format);
  if (tiled && params.arithmetic == Arithmetic::kFp4) return ItemKind::kPagesFp4;
  // A long chunk reads each tile for hundreds of rows: there dequantizing once costs less than
  // unpacking for every four rows. In reproducible mode every row must take the one path.
  const bool long_chunk =
      rows.request().query_len > kMaxDecodeQueries && !params.plan->rule.reproducible;
  if (long_chunk && matrix) return ItemKind::kMatrix;
  return long_chunk || !tiled ? ItemKind::kPagesFloat : ItemKind::kPagesInteger;
}

int row_block(ItemKind kind) {
  const bool many = kind == ItemKind::kPagesFloat || kind == ItemKind::kMatrix;
  return many ? kPrefillRowBlock : kDecodeRowBlock;
}

std::int64_t split_tiles(ItemKind kind, std::int64_t end_tile) {
  // fp4 arithmetic is relative to the row's maximum over all its pages: one item.
  if (kind == ItemKind::kPagesFp4) return end_tile + 1;
  return kind == ItemKind::kMatrix ? kMatrixSplitTiles : kSplitTiles;
}

}  // namespace

void AttendScratch::divide(const AttendParams& params, bool matrix) {
  items.clear();
  groups.clear();
  const int head_dim = params.layer->geometry.head_dim;
  std::int64_t state = 0;
  for (std::size_t r = 0; r < params.plan->requests.size(); ++r) {
    const RequestRows rows(params, params.plan->requests[r]);
    if (rows.num_rows() == 0) continue;
    const ItemKind kind = page_kind(params, rows, matrix);
    const int block = row_block(kind);
    for (int head = 0; head < params.layer->num_kv_heads; ++head) {
      for (std::int64_t first = 0; first < rows.num_rows(); first += block) {
        AttendGroup group;
        group.request = static_cast<std::int32_t>(r);
        group.kv_head = head;
        group.first_row = first;
        group.rows =
            static_cast<std::int32_t>(std::min<std::int64_t>(block, rows.num_rows() - first));
        group.capacity = kind == ItemKind::kMatrix
                             ? (group.rows + kMatrixRows - 1) / kMatrixRows * kMatrixRows
                             : group.rows;
        group.first_item = static_cast<std::int32_t>(items.size());
        const std::int64_t first_tile = rows.first_tile(first / rows.group_size());
        const std::int64_t end_tile = rows.end_tile((first + group.rows - 1) / rows.group_size());
        const auto add = [&](ItemKind item_kind, std::int64_t begin, std::int64_t end) {
          items.push_back({static_cast<std::int32_t>(groups.size()), item_kind, begin, end, state});
          state += partial_floats(group.capacity, head_dim);
        };
        if (kind != ItemKind::kMatrix) add(ItemKind::kBf16, first_tile, end_tile);
        const std::int64_t step = split_tiles(kind, end_tile);
        for (std::int64_t begin = first_tile; begin < end_tile;) {
          const std::int64_t end = std::min(end_tile, (begin / step + 1) * step);
          add(kind, begin, end);
          begin = end;
        }
        // Rows before the sequence's first token have no tiles, but their results are stored, too.
        if (static_cast<std::int32_t>(items.size()) == group.first_item) {
          add(kind, first_tile, first_tile);
        }
        group.num_items = static_cast<std::int32_t>(items.size()) - group.first_item;
        if (kind == ItemKind::kMatrix && group.num_items == 1) {
          state = items.back().state;
          items.back().state = -1;
        }
        groups.push_back(group);
      }
    }
  }
  floats.reserve(static_cast<std::size_t>(state));
  if (pending_size < groups.size()) {
    pending_size = groups.size();
    pending = std::make_unique<std::atomic<std::int32_t>[]>(pending_size);
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    pending[g].store(groups[g].num_items, std::memory_order_relaxed);
  }
}

}  // namespace bitdecoding::cpu
