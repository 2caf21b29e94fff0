// SPDX-License-Identifier: Apache-2.0
// What one attend call is divided into. An item is a range of tiles for a block of query rows of
// one KV head, read from one kind of source; items of a group share rows and are merged in their
// order, by whichever thread finishes last. Splits are cut at fixed tile numbers, never by the
// number of threads, so a result depends on neither.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "bitdecoding/attend.h"

namespace bitdecoding::cpu {

inline constexpr std::int64_t kSplitTiles = 32;  // 2,048 tokens
inline constexpr int kDecodeRowBlock = 64;       // rows of an item that reads codes as integers
inline constexpr int kPrefillRowBlock = 512;     // rows of an item that dequantizes: amortises it

enum class ItemKind : std::uint8_t { kPagesInteger, kPagesFloat, kPagesFp4, kBf16 };

struct AttendItem {
  std::int32_t group = 0;
  ItemKind kind = ItemKind::kPagesInteger;
  std::int64_t tile_begin = 0;
  std::int64_t tile_end = 0;
  std::int64_t state = 0;  // offset of its partial result in `floats`
};

struct AttendGroup {
  std::int32_t request = 0;
  std::int32_t kv_head = 0;
  std::int64_t first_row = 0;
  std::int32_t rows = 0;
  std::int32_t first_item = 0;
  std::int32_t num_items = 0;
};

// A partial result of `rows` rows: max[rows], sum[rows], out[rows][head_dim].
struct PartialView {
  float* max;
  float* sum;
  float* out;
};

struct AttendScratch {
  std::vector<AttendItem> items;
  std::vector<AttendGroup> groups;
  std::vector<float> floats;
  std::unique_ptr<std::atomic<std::int32_t>[]> pending;  // items left, a group
  std::size_t pending_size = 0;

  static std::int64_t partial_floats(std::int64_t rows, int head_dim) {
    return rows * (head_dim + 2);
  }
  PartialView partial(const AttendItem& item, int rows) {
    float* base = floats.data() + item.state;
    return {base, base + rows, base + 2 * static_cast<std::int64_t>(rows)};
  }

  void divide(const AttendParams& params);
};

}  // namespace bitdecoding::cpu
