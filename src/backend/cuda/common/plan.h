// SPDX-License-Identifier: Apache-2.0
// A step's plan as kernels see it: plain arrays in device memory, passed by value.
#pragma once

#include <cstdint>

#include "bitdecoding/cuda.h"
#include "numeric/portable.h"

namespace bitdecoding::cuda {

// BF16 rows are read sixteen at a time.
inline constexpr int kUnitRows = 16;
// Query columns of one MMA.
inline constexpr int kColumns = 8;

struct Request {
  std::int32_t seq_len = 0;
  std::int32_t query_begin = 0;  // first row of query and output
  std::int32_t query_len = 0;    // 0 = nothing to decode
  std::int32_t num_units = 0;    // shadow units
};

// Positions [begin, end) that lie in rows row .. of one sixteen-row part of a slot.
struct ShadowUnit {
  std::int32_t begin = 0, end = 0;
  std::int32_t slot = 0;
  std::int32_t row = 0;  // row of the slot's group that holds `begin`
};

struct Write {
  std::int32_t page = 0, group = 0;
  std::int32_t first_row = 0, num_rows = 0;
  std::int32_t source = 0;
  std::int32_t slot = -1;
  std::int32_t prefix_in_slot = 0;
  std::int32_t reserved = 0;
};

// Work of attend for one value of window_left, a list of rows (a request, KV head and block of
// query rows) of units (sixteen BF16 rows or one tile of 64 tokens). It is shared in one of two
// ways. Parts: each row is cut into parts of at most `most` units, and a block takes one part.
// Runs: each block takes an equal run of units, which may hold the end of one row and the beginning
// of the next. The second row costs a block as much as kRowCost units: parts are taken where the
// largest is at most that much larger than an equal run.
struct Work {
  std::int32_t window_left = -1;
  // [num_requests + 2]: where each request's parts (or units) begin, their number, and `most`; 0
  // for runs.
  std::int32_t* prefix = nullptr;
};
inline constexpr int kRowCost = 20;
// Values of `most` that are tried.
inline constexpr int kMostTries = 16;
BD_HOST_DEVICE constexpr int most_to_try(int units, int blocks, int attempt) {
  return (units + blocks - 1) / blocks + attempt * kRowCost / (kMostTries - 1);
}
BD_HOST_DEVICE constexpr int parts_of_row(int units, int most) { return (units + most - 1) / most; }

struct PlanView {
  std::int32_t num_requests = 0;
  std::int32_t unit_stride = 0;
  const Request* requests = nullptr;  // [num_requests]
  const std::int32_t* pages = nullptr;
  std::int64_t page_stride = 0;       // entries of `pages` a request
  const ShadowUnit* units = nullptr;  // [num_requests][unit_stride]
  const Write* writes = nullptr;
  const std::int32_t* num_writes = nullptr;  // on the device
  std::int32_t max_writes = 0;               // of this step: the grid
  const std::int32_t* prefix = nullptr;      // of the layer's window: see Work
  std::int32_t num_blocks = 0;               // of attend: one a multiprocessor
  unsigned long long* bad_pages = nullptr;
  std::int64_t num_pages = 0;
  std::int32_t page_size = 0, tiles_per_page = 0;
  std::uint32_t page_reciprocal = 0;  // ceil(2^32 / tiles_per_page), for more than one
  std::int32_t columns = kColumns;    // query rows of one block of rows
  std::int32_t sink_tokens = 0, tail_tokens = 0, group_tokens = 16;
  std::int32_t reproducible = 0;
};

// First tile that any query row of the request sees, and the number of tiles from there on.
BD_HOST_DEVICE constexpr int first_tile(const Request& r, int window_left) {
  const int first_query = r.seq_len - r.query_len;
  const int begin = window_left < 0 || first_query < window_left ? 0 : first_query - window_left;
  return begin / kTileTokens;
}
BD_HOST_DEVICE constexpr int num_tiles(const Request& r, int window_left) {
  if (r.query_len == 0) return 0;
  const int n = (r.seq_len + kTileTokens - 1) / kTileTokens - first_tile(r, window_left);
  return n < 0 ? 0 : n;
}
// Units of one KV head and block of rows; a request without tokens still owns one, so that its
// output is written.
BD_HOST_DEVICE constexpr int units_of(const Request& r, int window_left) {
  if (r.query_len == 0) return 0;
  const int n = r.num_units + num_tiles(r, window_left);
  return n == 0 ? 1 : n;
}
// Units of a row, and rows, that attend works on: those of longer chunks are prefilled elsewhere.
BD_HOST_DEVICE constexpr int decoded_units(const Request& r, int window_left) {
  return r.query_len > kMaxDecodeQueries ? 0 : units_of(r, window_left);
}
// Column blocks of eight query rows that a kernel works on at once: larger heads' accumulators fill
// the registers with one.
BD_HOST_DEVICE constexpr int most_column_blocks(int head_dim) { return head_dim <= 128 ? 2 : 1; }
BD_HOST_DEVICE constexpr int row_blocks(int query_len, int group, int columns) {
  // One or two column blocks: a shift instead of a division.
  return (query_len * group + columns - 1) >> (columns == kColumns ? 3 : 4);
}

// ShadowRule::tail_begin on the device.
BD_HOST_DEVICE constexpr int tail_begin(const PlanView& p, int n) {
  if (p.tail_tokens < 0 || n <= 0) return n < 0 ? 0 : n;
  int begin = n < p.tail_tokens ? 0 : (n - p.tail_tokens) / p.group_tokens * p.group_tokens;
  if (p.reproducible != 0) {
    const int page = (n - 1) / p.page_size * p.page_size;
    begin = begin > page ? begin : page;
  }
  return begin;
}

}  // namespace bitdecoding::cuda
