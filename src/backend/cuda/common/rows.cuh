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

// Query rows of the block, one a warp at a time: as BF16 terms, and rotated, scaled to FP16.
template <class T>
__device__ inline void load_queries(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row) {
  using Row = LaneRow<T::kHeadDim>;
  const int lane = threadIdx.x & 31;
  const Request r = a.plan.requests[row.request];
  for (int i = threadIdx.x >> 5; i < T::kRows; i += T::kWarps) {
    const int index = row.block * T::kRows + i;
    const int token = index / a.group;
    const bool exists = token < r.query_len;
    const int head = row.head * a.group + index - token * a.group;
    const std::int64_t base =
        (r.query_begin + token) * a.query_stride_token + head * a.query_stride_head;
    Row lanes;
    float dot = 0.0F;
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
      for (int e = 0; e < Row::kEach; ++e) {
        const int dim = Row::dim(part, e);
        const float x = exists ? load_element(a.query, a.query_dtype, base + dim) : 0.0F;
        if (a.key_shift != nullptr) dot += x * a.key_shift[row.head * T::kHeadDim + dim];
        const __nv_bfloat16 high = __float2bfloat16_rn(x);
        s.row.high[i][dim] = high;
        s.row.low[i][dim] = __float2bfloat16_rn(x - __bfloat162float(high));
        lanes.x[part][e] = x;
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
  const Request& r = a.plan.requests[row.request];
  const int index = row.block * T::kRows + column;
  const int token = index / a.group;
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

// Adds the warps' shares up: the finished row, or this block's part of it into the workspace.
template <class T>
__device__ inline void store_share(const DecodeArgs& a, const SharedStorage<T>& s,
                                   const ListRow& row, float* partial, int rows_in_use) {
  constexpr int kPitch = SharedStorage<T>::kMergePitch;
  for (int i = threadIdx.x; i < rows_in_use * T::kHeadDim / 2; i += 32 * T::kWarps) {
    const int column = 2 * i / T::kHeadDim;
    const int dim = 2 * i % T::kHeadDim;
    float top = kNoMaximum;
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) top = fmaxf(top, s.maximum[w][column]);
    float sum = 0.0F;
    float2 value = {0.0F, 0.0F};
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) {
      const float weight = exp2_approx(s.maximum[w][column] - top);
      const auto x =
          *reinterpret_cast<const float2*>(&s.merge[(w * rows_in_use + column) * kPitch + dim]);
      sum += weight * s.sum[w][column];
      value.x = fmaf(weight, x.x, value.x);
      value.y = fmaf(weight, x.y, value.y);
    }
    if (partial == nullptr) {
      store_pair<T>(a, row, column, dim, value, top, sum);
      continue;
    }
    float* out = partial + column * (T::kHeadDim + 2);
    *reinterpret_cast<float2*>(out + dim) = value;
    if (dim == 0) *reinterpret_cast<float2*>(out + T::kHeadDim) = {top, sum};
  }
}

// All parts of a row that several blocks share, by every thread of the last block to arrive.
template <class T>
__device__ inline void merge_blocks(const DecodeArgs& a, const ListRow& row, const Shares& shares,
                                    int rows_in_use) {
  const int first = shares.of(row.begin);
  const int parts = shares.of(row.end - 1) - first + 1;
  const std::int64_t stride = partial_floats(T::kRows, T::kHeadDim);
  // The row is the last of its first block, and the first of all others.
  const auto part_of = [&](int k) {
    return a.partials + (2 * static_cast<std::int64_t>(first + k) + (k == 0 ? 1 : 0)) * stride;
  };
  // Weights and values are asked for together, a batch of parts at a time: one memory latency for
  // up to kBatch parts.
  constexpr int kBatch = 8;
  for (int i = threadIdx.x; i < rows_in_use * T::kHeadDim / 2; i += 32 * T::kWarps) {
    const int column = 2 * i / T::kHeadDim;
    const int dim = 2 * i % T::kHeadDim;
    const int at = column * (T::kHeadDim + 2);
    float top = kNoMaximum;
    float sum = 0.0F;
    float2 value = {0.0F, 0.0F};
    for (int base = 0; base < parts; base += kBatch) {
      float2 share[kBatch];  // maximum, sum
      float2 x[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        share[k] = {kNoMaximum, 0.0F};
        x[k] = {0.0F, 0.0F};
        if (base + k >= parts) continue;
        const float* part = part_of(base + k) + at;
        share[k] = __ldcg(reinterpret_cast<const float2*>(part + T::kHeadDim));
        x[k] = __ldcg(reinterpret_cast<const float2*>(part + dim));
      }
      float higher = top;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) higher = fmaxf(higher, share[k].x);
      const float down = exp2_approx(top - higher);
      sum *= down;
      value.x *= down;
      value.y *= down;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const float weight = exp2_approx(share[k].x - higher);
        sum = fmaf(weight, share[k].y, sum);
        value.x = fmaf(weight, x[k].x, value.x);
        value.y = fmaf(weight, x[k].y, value.y);
      }
      top = higher;
    }
    store_pair<T>(a, row, column, dim, value, top, sum);
  }
}

}  // namespace bitdecoding::cuda
