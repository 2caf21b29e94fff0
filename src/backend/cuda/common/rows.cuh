// SPDX-License-Identifier: Apache-2.0
// Query rows in, results out: rotation and scaling of queries, sums over warps and over blocks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/rotate.cuh"
#include "common/shadow_rows.cuh"
#include "common/tensor.cuh"
#include "common/warp_row.cuh"

namespace bitdecoding::cuda {

// The step's row that query row `index` of a request and KV head belongs to.
__device__ inline int token_of_row(const DecodeArgs& a, int index) {
  return static_cast<int>(static_cast<unsigned>(index) / static_cast<unsigned>(a.group));
}

// Query rows of the block, one a warp at a time: as BF16 terms, and rotated, scaled to FP16.
template <class T>
__device__ inline void load_queries(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row) {
  using Row = LaneRow<T::kHeadDim>;
  const int lane = threadIdx.x & 31;
  const Request& r = row.of;
  for (int i = threadIdx.x >> 5; i < T::kRows; i += T::kWarps) {
    const int index = row.block * T::kRows + i;
    const int token = token_of_row(a, index);
    const bool exists = token < r.query_len;
    const int head = row.head * a.group + index - token * a.group;
    const std::int64_t base =
        (r.query_begin + token) * a.query_stride_token + head * a.query_stride_head;
    Row lanes = {};
    Row shift = {};
    if (exists) {
#pragma unroll
      for (int part = 0; part < Row::kParts; ++part) {
        const int dim = Row::dim(part, 0);
        load_elements(a.query, a.query_dtype, base + dim, lanes.x[part]);
        if (a.key_shift != nullptr) {
          load_elements(a.key_shift, DType::kF32, row.head * T::kHeadDim + dim, shift.x[part]);
        }
      }
    }
    float dot = 0.0F;
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
      for (int e = 0; e < Row::kEach; ++e) {
        const int dim = Row::dim(part, e);
        const float x = lanes.x[part][e];
        if (a.key_shift != nullptr) dot += x * shift.x[part][e];
        const __nv_bfloat16 high = __float2bfloat16_rn(x);
        s.row.high[i][dim] = high;
        s.row.low[i][dim] = __float2bfloat16_rn(x - __bfloat162float(high));
      }
    }
    if (a.hadamard) lanes.rotate();
    float top = 0.0F;
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
      for (int e = 0; e < Row::kEach; ++e) top = fmaxf(top, fabsf(lanes.x[part][e]));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, step));
      dot += __shfl_xor_sync(0xFFFFFFFFU, dot, step);
    }
    // The row's largest value comes to [1, 2): FP16 keeps 11 bits of every product that matters.
    const int biased = static_cast<int>(__float_as_uint(top) >> 23);
    const int exponent = biased > 0 && biased < 255 ? biased - 127 : 0;
    const float down = power_of_two(-exponent);
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
      for (int e = 0; e < Row::kEach; ++e) {
        s.row.rotated[i][Row::dim(part, e)] = __float2half_rn(lanes.x[part][e] * down);
      }
    }
    if (lane == 0) {
      const int outer = a.key_outer == nullptr ? 0 : a.key_outer[row.head];
      const float unit = a.softcap == 0.0F ? a.sm_scale * kLog2e : a.sm_scale / a.softcap;
      s.row.factor[i] =
          unit * power_of_two(exponent) * power_of_two(outer - Scales<T::kFormat>::kExponent);
      s.row.offset[i] = unit * dot;
      s.row.position[i] = exists ? r.seq_len - r.query_len + token : -1;
    }
  }
}

// Two neighbouring channels of a finished query row. `value` is in the units of the tiles'
// products.
template <class T>
__device__ inline void store_pair(const DecodeArgs& a, const ListRow& row, int column, int dim,
                                  float2 value, float maximum, float sum) {
  const Request& r = row.of;
  const int index = row.block * T::kRows + column;
  const int token = token_of_row(a, index);
  if (token >= r.query_len) return;
  const int head = row.head * a.group + index - token * a.group;
  float weight = 0.0F;
  float lse = -INFINITY;
  if (sum != 0.0F) {
    float whole = sum;
    float top = maximum;
    if (a.attn_sink != nullptr) {
      // The learned sink enters the denominator once, here.
      const float sink = a.attn_sink[head] * kLog2e;
      top = fmaxf(maximum, sink);
      whole = sum * exp2_approx(maximum - top) + exp2_approx(sink - top);
    }
    const int outer = a.value_outer == nullptr ? 0 : a.value_outer[row.head];
    weight =
        exp2_approx(maximum - top) * power_of_two(outer - Scales<T::kFormat>::kExponent) / whole;
    lse = (top + log2f(whole)) * kLn2;
  }
  const std::int64_t at =
      (r.query_begin + token) * a.output_stride_token + head * a.output_stride_head + dim;
  // A sum of nothing is zero, whatever the values hold.
  store_element(a.output, a.output_dtype, at, weight == 0.0F ? 0.0F : value.x * weight);
  store_element(a.output, a.output_dtype, at + 1, weight == 0.0F ? 0.0F : value.y * weight);
  if (dim == 0 && a.lse != nullptr) {
    a.lse[static_cast<std::int64_t>(r.query_begin + token) * a.num_q_heads + head] = lse;
  }
}

// Lays the warps' accumulators down for store_share, each with its own maximum.
template <class T>
__device__ inline void lay_down(SharedStorage<T>& s, const Accumulators<T>& acc, int rows_in_use) {
  constexpr int kPitch = SharedStorage<T>::kMergePitch;
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  const int g = lane >> 2;
  const int t = lane & 3;
  float* to = s.merge + warp * rows_in_use * kPitch;
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = kColumns * n + 2 * t + j;
      float sum = acc.sum[n][j];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, step);
      if (column >= rows_in_use) continue;
      if (g == 0) {
        s.maximum[warp][column] = acc.maximum[n][j];
        s.sum[warp][column] = sum;
      }
#pragma unroll
      for (int m = 0; m < T::kValueGroups; ++m) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          to[column * kPitch + 16 * m + g + 8 * up] = acc.output[n][m][j + 2 * up];
        }
      }
    }
  }
  sync_workers<T>();
}

// Adds up what was laid down in the first `slots` places: the finished row, or this block's part of
// it into the workspace.
template <class T>
__device__ inline void store_share(const DecodeArgs& a, const SharedStorage<T>& s,
                                   const ListRow& row, int slots, float* partial, int rows_in_use) {
  constexpr int kPitch = SharedStorage<T>::kMergePitch;
  constexpr int kBatch = 4;
  for (int i = threadIdx.x; i < rows_in_use * T::kHeadDim / 2; i += 32 * T::kWarps) {
    const int column = 2 * i / T::kHeadDim;
    const int dim = 2 * i % T::kHeadDim;
    float top = kNoMaximum;
    float sum = 0.0F;
    float2 value = {0.0F, 0.0F};
#pragma unroll 1
    for (int base = 0; base < slots; base += kBatch) {
      float maximum[kBatch];
      float of[kBatch];
      float2 x[kBatch];
      float higher = top;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int w = min(base + k, slots - 1);
        maximum[k] = base + k < slots ? s.maximum[w][column] : kNoMaximum;
        of[k] = base + k < slots ? s.sum[w][column] : 0.0F;
        x[k] =
            *reinterpret_cast<const float2*>(&s.merge[(w * rows_in_use + column) * kPitch + dim]);
        higher = fmaxf(higher, maximum[k]);
      }
      const float down = exp2_approx(top - higher);
      sum *= down;
      value.x *= down;
      value.y *= down;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const float weight = base + k < slots ? exp2_approx(maximum[k] - higher) : 0.0F;
        sum = fmaf(weight, of[k], sum);
        value.x = fmaf(weight, x[k].x, value.x);
        value.y = fmaf(weight, x[k].y, value.y);
      }
      top = higher;
    }
    if (partial == nullptr) {
      store_pair<T>(a, row, column, dim, value, top, sum);
      continue;
    }
    float* out = partial + column * (T::kHeadDim + kPartialExtra);
    *reinterpret_cast<float2*>(out + dim) = value;
    if (dim == 0) *reinterpret_cast<float2*>(out + T::kHeadDim) = {top, sum};
  }
}

// A row's parts that other blocks left in the workspace, where lay_down puts what warps have.
// Returns the number of places; store_share makes the row of them. A warp adds up 128 channels of
// every so-many-th part. Short code, since every block's is fetched from far.
template <class T>
__device__ inline int gather_parts(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row,
                                   int rows_in_use) {
  constexpr int kPitch = SharedStorage<T>::kMergePitch;
  constexpr int kBatch = 4;
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  const RowBlocks blocks = blocks_of(row, s.shares);
  const int items = (rows_in_use * T::kHeadDim + 127) / 128;
  const int slots = max(divide(T::kWarps, items), 1);
  const int slot = divide(warp, items);
  for (int item = warp - slot * items; item < items && slot < slots; item += T::kWarps) {
    const int column = (128 * item + 4 * lane) / T::kHeadDim;
    const int dim = (128 * item + 4 * lane) % T::kHeadDim;
    if (column >= rows_in_use) continue;
    const float* at = a.partials + 2 * blocks.first * partial_floats(T::kRows, T::kHeadDim) +
                      column * (T::kHeadDim + kPartialExtra);
    float top = kNoMaximum;
    float sum = 0.0F;
    float4 value = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 1
    for (int base = slot; base < blocks.count; base += kBatch * slots) {
      float2 share[kBatch];  // maximum, sum
      float4 x[kBatch];
      float higher = top;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int k = base + b * slots;
        share[b] = {kNoMaximum, 0.0F};
        x[b] = {0.0F, 0.0F, 0.0F, 0.0F};
        if (k < blocks.count) {
          // The row is the last of its first block, and the first of all others.
          const float* part =
              at + (2 * k + (k == 0 ? 1 : 0)) * partial_floats(T::kRows, T::kHeadDim);
          x[b] = __ldcg(reinterpret_cast<const float4*>(part + dim));
          share[b] = __ldcg(reinterpret_cast<const float2*>(part + T::kHeadDim));
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) higher = fmaxf(higher, share[b].x);
      const float down = exp2_approx(top - higher);
      sum *= down;
      value = {value.x * down, value.y * down, value.z * down, value.w * down};
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float weight = exp2_approx(share[b].x - higher);
        sum = fmaf(weight, share[b].y, sum);
        value.x = fmaf(weight, x[b].x, value.x);
        value.y = fmaf(weight, x[b].y, value.y);
        value.z = fmaf(weight, x[b].z, value.z);
        value.w = fmaf(weight, x[b].w, value.w);
      }
      top = higher;
    }
    *reinterpret_cast<float4*>(s.merge + (slot * rows_in_use + column) * kPitch + dim) = value;
    if (dim == 0) {
      s.maximum[slot][column] = top;
      s.sum[slot][column] = sum;
    }
  }
  sync_workers<T>();
  return slots;
}

}  // namespace bitdecoding::cuda
