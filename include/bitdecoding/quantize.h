// SPDX-License-Identifier: Apache-2.0
// Quantize: rows of K and V become codes and scales in pages, and BF16 rows in shadow slots.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bitdecoding/page.h"
#include "bitdecoding/recipe.h"

#pragma GCC visibility push(default)
namespace bitdecoding {

// The pages of one layer. Base address of (page, head): pages + page * stride_page + head *
// stride_head, in bytes, 64-bit; geometry.head_bytes bytes there are contiguous.
struct CacheView {
  std::uint8_t* pages = nullptr;
  std::int64_t num_pages = 0;
  std::int64_t stride_page = 0;  // bytes
  std::int64_t stride_head = 0;  // bytes
};

// BF16 rows of one layer, contiguous [num_slots][num_kv_heads][2 (K, V)][group_tokens][head_dim].
// K is stored as it came (after RoPE; not shifted, not rotated).
struct ShadowPool {
  std::uint16_t* rows = nullptr;
  std::int32_t num_slots = 0;
};

// A borrowed [tokens][heads][head_dim] tensor; head_dim is contiguous.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t stride_token = 0;  // elements
  std::int64_t stride_head = 0;   // elements
};

// What is constant for a layer.
struct LayerConfig {
  PageGeometry geometry;
  int num_kv_heads = 0;
  int num_q_heads = 0;
  ScaleRule key_rule = ScaleRule::kFourSix;
  ScaleRule value_rule = ScaleRule::kAmax6;
  bool hadamard = true;              // rotates K and Q; tiled formats only
  const float* key_shift = nullptr;  // [num_kv_heads][head_dim] or null
  // Means of V that pages leave out and attend adds back; [num_kv_heads][head_dim] or null. BF16
  // rows hold V as it came.
  const float* value_shift = nullptr;
  const std::int8_t* key_outer = nullptr;    // [num_kv_heads] exponents of the outer scale, or null
  const std::int8_t* value_outer = nullptr;  // [num_kv_heads], or null
};

// Incremented with relaxed atomics; may be shared by layers and threads.
struct WriteCounters {
  std::uint64_t non_finite = 0;          // NaN or infinity in K or V: stored as zero
  std::uint64_t saturated_blocks = 0;    // amax above what the largest scale can express
  std::uint64_t flushed_blocks = 0;      // non-zero blocks whose scale rounded to zero
  std::uint64_t requantized_prefix = 0;  // groups continued from their own codes (BF16 rows lost)
};

struct WriteParams {
  const LayerConfig* layer = nullptr;
  CacheView cache;
  ShadowPool shadow;  // rows may be null when the plan names no slot
  TensorView key, value;
  const StepPlan* plan = nullptr;
  WriteCounters* counters = nullptr;  // nullable
};

// One block of values by itself: the public face of the scale rules. x has 16 or 32 values; codes
// gets one code a value (0..15). Returns the scale code (E4M3, or E8M0 for the mxfp4 rules).
Result<std::uint8_t> quantize_block(ScaleRule rule, std::span<const float> x, float outer_scale,
                                    std::span<std::uint8_t> codes);
float dequantize_value(Format format, std::uint8_t code, std::uint8_t scale_code,
                       float outer_scale);

}  // namespace bitdecoding
#pragma GCC visibility pop
