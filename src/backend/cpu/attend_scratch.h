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

#include "backend/cpu/aligned_buffer.h"
#include "bitdecoding/attend.h"

namespace bitdecoding::cpu {

inline constexpr std::int64_t kSplitTiles = 32;  // 2,048 tokens
// A matrix item has many rows: work enough in one, and a large partial result.
inline constexpr std::int64_t kMatrixSplitTiles = 128;
inline constexpr int kDecodeRowBlock = 64;     // rows of an item that reads codes as integers
inline constexpr int kPrefillRowBlock = 1024;  // rows of an item that dequantizes: amortises it

// kMatrix reads a range's pages and its BF16 rows, the others one of the two.
enum class ItemKind : std::uint8_t { kPagesInteger, kPagesFloat, kPagesFp4, kBf16, kMatrix };

struct AttendItem {
  std::int32_t group = 0;
  ItemKind kind = ItemKind::kPagesInteger;
  std::int64_t tile_begin = 0;
  std::int64_t tile_end = 0;
  // Offset of its partial result in `floats`; -1: the only item of a group of many rows, whose
  // result is merged at once and stays in its thread's memory.
  std::int64_t state = 0;
};

struct AttendGroup {
  std::int32_t request = 0;
  std::int32_t kv_head = 0;
  std::int64_t first_row = 0;
  std::int32_t rows = 0;
  std::int32_t capacity = 0;  // rows that a partial result has room for
  std::int32_t first_item = 0;
  std::int32_t num_items = 0;
};

// A partial result of `capacity` rows: out[capacity][head_dim], max[capacity], sum[capacity];
// aligned to cache lines.
struct PartialView {
  float* max;
  float* sum;
  float* out;
};

struct AttendScratch {
  std::vector<AttendItem> items;
  std::vector<AttendGroup> groups;
  AlignedBuffer<float> floats;
  std::unique_ptr<std::atomic<std::int32_t>[]> pending;  // items left, a group
  std::size_t pending_size = 0;

  static std::int64_t partial_floats(std::int64_t capacity, int head_dim) {
    constexpr std::int64_t kLine = 16;
    return (capacity * (head_dim + 2) + kLine - 1) / kLine * kLine;
  }
  // `own`: partial_floats of the calling thread.
  PartialView partial(const AttendItem& item, int head_dim, float* own) const {
    const std::int64_t capacity = groups[item.group].capacity;
    float* out = item.state < 0 ? own : floats.data() + item.state;
    float* max = out + capacity * head_dim;
    return {max, max + capacity, out};
  }

  // `matrix`: long chunks go to the matrix unit.
  void divide(const AttendParams& params, bool matrix);
};

}  // namespace bitdecoding::cpu
