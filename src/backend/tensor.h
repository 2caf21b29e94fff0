// SPDX-License-Identifier: Apache-2.0
// Elements of borrowed tensors and of the shadow pool, one at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "bitdecoding/attend.h"
#include "bitdecoding/quantize.h"
#include "numeric/bf16.h"

namespace bitdecoding {

inline float load_element(const TensorView& t, std::int64_t token, std::int64_t head, int dim) {
  const std::int64_t i = token * t.stride_token + head * t.stride_head + dim;
  switch (t.dtype) {
    case DType::kF32:
      return static_cast<const float*>(t.data)[i];
    case DType::kBf16:
      return decode_bf16(static_cast<const std::uint16_t*>(t.data)[i]);
    case DType::kF16:
      return decode_f16(static_cast<const std::uint16_t*>(t.data)[i]);
  }
  return 0.0F;
}

// The value that pages and slots are made from: rounded to BF16; NaN and infinity become zero and
// are counted.
inline float storable(float x, std::uint64_t* non_finite) {
  const float rounded = round_to_bf16(x);
  if (std::isfinite(rounded)) return rounded;
  ++*non_finite;
  return 0.0F;
}

// The same rule where a step's own rows are read as they came: what cannot be stored is zero.
inline float attendable(float x) { return std::isfinite(round_to_bf16(x)) ? x : 0.0F; }

inline void store_element(void* data, DType dtype, std::int64_t index, float x) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[index] = x;
      break;
    case DType::kBf16:
      static_cast<std::uint16_t*>(data)[index] = encode_bf16(x);
      break;
    case DType::kF16:
      static_cast<std::uint16_t*>(data)[index] = encode_f16(x);
      break;
  }
}

// First element of row `row` of a slot; side 0 is K, 1 is V.
inline std::int64_t shadow_row_index(const LayerConfig& layer, std::int32_t slot, int head,
                                     int side, int row) {
  const std::int64_t block = (std::int64_t{slot} * layer.num_kv_heads + head) * 2 + side;
  return (block * layer.geometry.group_tokens + row) * layer.geometry.head_dim;
}

inline float outer_scale(const std::int8_t* exponents, int head) {
  return exponents == nullptr ? 1.0F : std::ldexp(1.0F, exponents[head]);
}

inline std::uint8_t* page_head(const CacheView& cache, std::int64_t page, int head) {
  return cache.pages + page * cache.stride_page + head * cache.stride_head;
}

}  // namespace bitdecoding
