// SPDX-License-Identifier: Apache-2.0
// What the host side needs of the decode kernels: arguments, sizes, launch.
#pragma once

#include <cstdint>

#include "bitdecoding/status.h"
#include "common/plan.h"

namespace bitdecoding::cuda {

struct DecodeArgs {
  PlanView plan;
  const std::uint8_t* pages = nullptr;
  std::int64_t stride_page = 0, stride_head = 0;  // bytes
  const std::uint16_t* shadow = nullptr;
  std::int32_t group_tokens = 16;
  const void* query = nullptr;
  std::int64_t query_stride_token = 0, query_stride_head = 0;
  void* output = nullptr;
  std::int64_t output_stride_token = 0, output_stride_head = 0;
  float* lse = nullptr;
  const float* key_shift = nullptr;
  const std::int8_t* key_outer = nullptr;
  const std::int8_t* value_outer = nullptr;
  const float* attn_sink = nullptr;
  std::int32_t num_q_heads = 0, num_kv_heads = 0;
  std::int32_t group = 1;               // query heads of one KV head
  std::int32_t rows_in_use = kColumns;  // most query rows that a block of rows has
  float sm_scale = 1.0F, softcap = 0.0F;
  std::int32_t window_left = -1;
  DType query_dtype = DType::kBf16, output_dtype = DType::kBf16;
  bool hadamard = true;
  float* partials = nullptr;         // [grid][2][columns][head_dim + kPartialExtra]
  std::int32_t* arrivals = nullptr;  // [rows], zero between launches
};

// The shape that picks a kernel.
struct DecodeShape {
  Format format = Format::kNvfp4;
  int head_dim = 128;
  int column_blocks = 1;  // 8 or 16 query rows at a time
};

// One folder an architecture. Each sets *launched when it has a kernel for the shape.
struct DecodeLaunch {
  int grid = 0;
  int shared_limit = 0;  // bytes a block may use
  void* stream = nullptr;
  bool dependent = false;  // may begin before its predecessor on the stream has ended
};
Status launch_decode_sm90(const DecodeShape& shape, const DecodeArgs& args, const DecodeLaunch& on);
Status launch_decode_sm80(const DecodeShape& shape, const DecodeArgs& args, const DecodeLaunch& on);

// Behind a row's channels: its maximum and its sum; four floats, so that rows are aligned.
inline constexpr int kPartialExtra = 4;
constexpr std::int64_t partial_floats(int columns, int head_dim) {
  return std::int64_t{columns} * (head_dim + kPartialExtra);
}

}  // namespace bitdecoding::cuda
