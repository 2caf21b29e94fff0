// SPDX-License-Identifier: Apache-2.0
// What the host side needs of attention in fp4 arithmetic, as FP4 tensor cores compute it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/decode.h"

namespace bitdecoding::cuda {

// Query rows that a block of threads works on.
inline constexpr int kFp4Rows = 8;

struct Fp4Args {
  DecodeArgs decode;
  std::int32_t query_terms = 2;
  float c = 8.0F, tau = 0.0F;
  double log_c = 0;             // natural logarithm
  double inverse_softcap = 0;   // 0 without a cap
  std::int32_t row_blocks = 1;  // blocks of query rows of one request and KV head
  std::int32_t splits = 1;      // parts that a block of rows' tiles are cut into
  // Where parts meet, when there is more than one; all blocks of rows, one after the other.
  double* maxima = nullptr;    // [splits][kFp4Rows]
  double* partials = nullptr;  // [splits + 1][kFp4Rows][head_dim + 2]; the last: BF16 rows
};

// Blocks of threads that share rows: at most this many, so the workspace does not depend on the
// step.
constexpr std::int64_t fp4_most_parts(int multiprocessors) {
  return std::int64_t{4} * multiprocessors;
}
// Parts of each of `blocks` blocks of rows; 1: each has a block of threads to itself.
constexpr std::int32_t fp4_splits(std::int64_t blocks, int multiprocessors) {
  const std::int64_t each = blocks == 0 ? 0 : fp4_most_parts(multiprocessors) / blocks - 1;
  return static_cast<std::int32_t>(std::max<std::int64_t>(each, 1));
}
constexpr std::int64_t fp4_workspace(int multiprocessors, int head_dim) {
  return fp4_most_parts(multiprocessors) * kFp4Rows * (head_dim + 3);
}

// Blocks of rows of a step.
constexpr std::int64_t fp4_blocks(const Fp4Args& a) {
  return std::int64_t{a.decode.plan.num_requests} * a.decode.num_kv_heads * a.row_blocks;
}

Status launch_attend_fp4(Format format, int head_dim, const Fp4Args& args, void* stream);

}  // namespace bitdecoding::cuda
