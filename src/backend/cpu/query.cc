// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/query.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "numeric/bf16.h"
#include "page/layout.h"
#include "transform/hadamard.h"

namespace bitdecoding::cpu {
namespace {

constexpr int kMaxHeadDim = 256;

// lrint for |x| < 2^22, without a call.
int nearest(float x) {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23 leaves integers in the low bits
  return std::bit_cast<std::int32_t>(x + kMagic) - std::bit_cast<std::int32_t>(kMagic);
}

// Whether no exponent is all ones: neither infinity nor NaN.
template <class Bits>
bool exponents_below(const Bits* x, int n, Bits all_ones) {
  int found = 0;
  for (int i = 0; i < n; ++i) found |= static_cast<int>((x[i] & all_ones) == all_ones);
  return found == 0;
}

bool all_finite(const float* x, int n) {
  int found = 0;
  for (int i = 0; i < n; ++i) {
    found |= static_cast<int>((std::bit_cast<std::uint32_t>(x[i]) & 0x7F800000U) == 0x7F800000U);
  }
  return found == 0;
}

}  // namespace

float dot(const float* a, const float* b, int n) {
  // Chains that a compiler may put side by side.
  constexpr int kChains = 16;
  float sums[kChains] = {};
  int i = 0;
  for (; i + kChains <= n; i += kChains) {
    for (int j = 0; j < kChains; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  for (int width = kChains / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

bool row_is_finite(const TensorView& tensor, std::int64_t token, int head, int head_dim) {
  const std::int64_t index = token * tensor.stride_token + head * tensor.stride_head;
  switch (tensor.dtype) {
    case DType::kF32:
      return all_finite(static_cast<const float*>(tensor.data) + index, head_dim);
    case DType::kBf16:
      return exponents_below<std::uint16_t>(static_cast<const std::uint16_t*>(tensor.data) + index,
                                            head_dim, 0x7F80);
    case DType::kF16:
      return exponents_below<std::uint16_t>(static_cast<const std::uint16_t*>(tensor.data) + index,
                                            head_dim, 0x7C00);
  }
  return false;
}

void load_row(const TensorView& tensor, std::int64_t token, int head, int head_dim, float* out) {
  const std::int64_t index = token * tensor.stride_token + head * tensor.stride_head;
  switch (tensor.dtype) {
    case DType::kF32:
      std::copy_n(static_cast<const float*>(tensor.data) + index, head_dim, out);
      break;
    case DType::kBf16: {
      const std::uint16_t* in = static_cast<const std::uint16_t*>(tensor.data) + index;
      for (int d = 0; d < head_dim; ++d) out[d] = decode_bf16(in[d]);
      break;
    }
    case DType::kF16: {
      const std::uint16_t* in = static_cast<const std::uint16_t*>(tensor.data) + index;
      for (int d = 0; d < head_dim; ++d) out[d] = decode_f16(in[d]);
      break;
    }
  }
}

void store_row(const AttendParams& params, std::int64_t token, int head, const float* in,
               float scale) {
  const int head_dim = params.layer->geometry.head_dim;
  const std::int64_t index = token * params.stride_output_token + head * params.stride_output_head;
  switch (params.output_dtype) {
    case DType::kF32: {
      float* out = static_cast<float*>(params.output) + index;
      for (int d = 0; d < head_dim; ++d) out[d] = in[d] * scale;
      break;
    }
    case DType::kBf16: {
      std::uint16_t* out = static_cast<std::uint16_t*>(params.output) + index;
      for (int d = 0; d < head_dim; ++d) out[d] = encode_bf16(in[d] * scale);
      break;
    }
    case DType::kF16: {
      std::uint16_t* out = static_cast<std::uint16_t*>(params.output) + index;
      for (int d = 0; d < head_dim; ++d) out[d] = encode_f16(in[d] * scale);
      break;
    }
  }
}

void load_query_rows(const AttendParams& params, const RequestPlan& request, int kv_head,
                     std::int64_t first, int rows, float scale, float* out) {
  const LayerConfig& layer = *params.layer;
  const int group_size = layer.num_q_heads / layer.num_kv_heads;
  const int head_dim = layer.geometry.head_dim;
  for (int r = 0; r < rows; ++r) {
    const std::int64_t row = first + r;
    float* q = out + std::int64_t{r} * head_dim;
    load_row(params.query, request.query_begin + row / group_size,
             kv_head * group_size + static_cast<int>(row % group_size), head_dim, q);
    for (int d = 0; d < head_dim; ++d) q[d] *= scale;
  }
}

void QuadQuery::prepare(const LayerConfig& layer, int kv_head, const float* rows, int num_rows,
                        int terms) {
  constexpr float kHighLevels = 127.0F;
  constexpr int kTermWeight = 128;
  const int head_dim = layer.geometry.head_dim;
  const int work = num_rows * terms;
  const int blocks = layout::key_column_blocks(head_dim) * 4;
  quads_.assign(static_cast<std::size_t>(blocks) * 4 * work, 0);
  bias_.assign(static_cast<std::size_t>(blocks) * work, 0);
  const float key_unit =
      layer.key_outer == nullptr ? 1.0F : std::ldexp(1.0F, layer.key_outer[kv_head]);
  const float scale_unit =
      layer.geometry.format == Format::kMxfp4 ? 1.0F : 256.0F;  // load_e4m3's unit
  float q[kMaxHeadDim];
  for (int r = 0; r < num_rows; ++r) {
    std::copy_n(rows + std::int64_t{r} * head_dim, head_dim, q);
    offset_[r] = layer.key_shift == nullptr
                     ? 0.0F
                     : dot(q, layer.key_shift + std::int64_t{kv_head} * head_dim, head_dim);
    if (layer.hadamard) hadamard(q, head_dim);
    float amax = 0.0F;
    for (int d = 0; d < head_dim; ++d) amax = std::max(amax, std::fabs(q[d]));
    // One term: 127 levels a side. Two: high * 128 + low, low in -64..63.
    const float levels = terms == 1 ? kHighLevels : kHighLevels * kTermWeight + 63.0F;
    const float step = amax > 0.0F ? amax / levels : 1.0F;
    const float inverse = amax > 0.0F ? levels / amax : 0.0F;
    scale_[r] = step * 0.5F * key_unit * scale_unit;  // tables hold twice the value
    std::int8_t bytes[2][kMaxHeadDim];
    for (int d = 0; d < head_dim; ++d) {
      const int level = nearest(q[d] * inverse);
      const int high = terms == 1 ? level : (level + kTermWeight / 2) >> 7;
      bytes[0][d] = static_cast<std::int8_t>(high);
      bytes[1][d] = static_cast<std::int8_t>(level - high * kTermWeight);
    }
    for (int t = 0; t < terms; ++t) {
      const int w = r * terms + t;
      for (int d = 0; d < head_dim; d += 16) {
        int sum = 0;
        for (int i = 0; i < 16; ++i) sum += bytes[t][d + i];
        bias_[static_cast<std::size_t>(d / 16) * work + w] = -12 * sum;
      }
      for (int d = 0; d < head_dim; d += 4) {
        std::memcpy(&quads_[static_cast<std::size_t>(d / 4) * work + w], bytes[t] + d, 4);
      }
    }
  }
  // The kernel adds the bias to the low int16 of a lane; the other half stays 0.
  for (std::int32_t& b : bias_)
    b = static_cast<std::int32_t>(static_cast<std::uint32_t>(b) & 0xFFFFU);
  query_ = {num_rows, terms, quads_.data(), bias_.data(), scale_, offset_};
}

void QuadQuery::widen(const DecodeKernels& kernels, int head_dim) {
  constexpr std::size_t kAlignment = 64;
  const std::int64_t bytes = kernels.wide_query_bytes(head_dim, query_.rows * query_.terms);
  wide_.resize(static_cast<std::size_t>(bytes) + kAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(wide_.data());
  std::uint8_t* aligned = wide_.data() + (kAlignment - address % kAlignment) % kAlignment;
  kernels.widen_query(head_dim, query_, aligned);
  query_.wide = aligned;
}

}  // namespace bitdecoding::cpu
