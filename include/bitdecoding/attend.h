// SPDX-License-Identifier: Apache-2.0
// Attend: queries read pages, shadow slots and the current chunk.
//
// For a query row at position q of a sequence (its own causal limit, q = seq_len - query_len + i)
// every visible position p <= q is read from exactly one source:
//   default        p in the current chunk of a prefilled request (query_len > kMaxDecodeQueries):
//                  the row of `key`/`value` as it came, an element that BF16 cannot hold as zero.
//                  Else, p in a shadow span of the plan: BF16. Else the page.
//   reproducible   p < sink_tokens or p >= rule.tail_begin(q + 1): the BF16-rounded row of the
//                  chunk or of the shadow span; else the page, also inside the chunk. The result
//                  is a function of the tokens alone, bit for bit.
// Scores of page positions are against rotated, shifted keys: the query is rotated and q . shift is
// added back, so that all parts share one softmax. The parts have their own maxima and are merged
// by log-sum-exp. A query that is not finite gives an output row and an LSE of NaN.
#pragma once

#include <cstdint>

#include "bitdecoding/quantize.h"

#pragma GCC visibility push(default)
namespace bitdecoding {

// Requests with at most this many query rows are decoded straight from pages and shadow slots.
// Longer ones are prefilled: the current chunk in full precision, the cached prefix dequantized.
inline constexpr int kMaxDecodeQueries = 8;

struct AttendParams {
  const LayerConfig* layer = nullptr;
  CacheView cache;
  ShadowPool shadow;
  TensorView query;        // [num_tokens][num_q_heads][head_dim]
  TensorView key, value;   // [num_tokens][num_kv_heads][head_dim], this step's rows
  void* output = nullptr;  // [num_tokens][num_q_heads][head_dim]
  DType output_dtype = DType::kF32;
  std::int64_t stride_output_token = 0;  // elements
  std::int64_t stride_output_head = 0;   // elements
  float* lse = nullptr;                  // [num_tokens][num_q_heads], natural log; nullable
  const StepPlan* plan = nullptr;

  float sm_scale = 1.0F;             // 2^-16 to 2^16
  float softcap = 0.0F;              // 0 = off; scores become softcap * tanh(score / softcap)
  int window_left = -1;              // visible: p > q - window_left - 1 (FlashAttention); -1 = off
  const float* attn_sink = nullptr;  // [num_q_heads] learned logits in the denominator, or null

  Arithmetic arithmetic = Arithmetic::kInt8;
  int query_terms = 2;                      // fp4 arithmetic
  float probability_c = 8.0F;               // fp4 arithmetic
  float probability_tau = 0.0F;             // fp4 arithmetic
  std::uint64_t* corrupt_scales = nullptr;  // counts 0x7F (E8M0: 0xFF) scale bytes met, nullable
};

}  // namespace bitdecoding
#pragma GCC visibility pop
