// SPDX-License-Identifier: Apache-2.0
// WarpRow's part for BF16 rows.
#pragma once

#include <cstdint>

#include "common/warp_row.cuh"

namespace bitdecoding::cuda {

// Sixteen BF16 rows. Queries and probabilities go in as two BF16 terms, so that nothing is lost to
// the format of the MMA.
template <class T>
template <class Values>
__device__ inline void WarpRow<T>::shadow(int index, const std::uint8_t* keys, Values values) {
  const ShadowUnit unit = spans_[index];
  const int first_row = unit.row % kUnitRows;
  const int last_row = first_row + (unit.end - unit.begin);
  const int origin = unit.begin - first_row;  // position of the sixteen rows' first
  float c[T::kColumnBlocks][4];
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0.0F;
  }
  const std::uint32_t key_at =
      shared_address(keys) + ((lane_ & 15) * T::kHeadDim + (lane_ >> 4) * 8) * 2;
#pragma unroll
  for (int step = 0; step < T::kHeadDim / 16; ++step) {
    std::uint32_t a[4];
    load_matrix(a, key_at + 32 * step);
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
      const __nv_bfloat16* high = &s_.row.high[kColumns * n + g_][16 * step + 2 * t_];
      const __nv_bfloat16* low = &s_.row.low[kColumns * n + g_][16 * step + 2 * t_];
      mma_bf16(c[n], a, *reinterpret_cast<const std::uint32_t*>(high),
               *reinterpret_cast<const std::uint32_t*>(high + 8));
      mma_bf16(c[n], a, *reinterpret_cast<const std::uint32_t*>(low),
               *reinterpret_cast<const std::uint32_t*>(low + 8));
    }
  }
  const float factor = a_.softcap == 0.0F ? a_.sm_scale * kLog2e : a_.sm_scale / a_.softcap;
  const float to_tiles = power_of_two(Scales<T::kFormat>::kExponent -
                                      (a_.value_outer == nullptr ? 0 : a_.value_outer[row_.head]));
  std::uint32_t high[T::kColumnBlocks][2];
  std::uint32_t low[T::kColumnBlocks][2];
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const ColumnRule rule = rule_of(kColumns * n + 2 * t_ + (i & 1));
      const int row = g_ + 8 * (i >> 1);
      const int position = origin + row;
      const bool sees = row >= first_row && row < last_row && position >= rule.first &&
                        position <= rule.last && is_bf16(rule, position);
      c[n][i] = sees ? finish_score(c[n][i], factor, 0.0F) : -INFINITY;
      top[i & 1] = fmaxf(top[i & 1], c[n][i]);
    }
    acc.raise(n, top[0], top[1]);
#pragma unroll
    for (int up = 0; up < 2; ++up) {
      const float x = exp2_approx(c[n][2 * up] - acc.maximum[n][0]);
      const float y = exp2_approx(c[n][2 * up + 1] - acc.maximum[n][1]);
      acc.sum[n][0] += x;
      acc.sum[n][1] += y;
      std::uint32_t rest;
      high[n][up] = transpose8x8(split_bf16(x * to_tiles, y * to_tiles, &rest));
      low[n][up] = transpose8x8(rest);
    }
  }
  // Rows outside the span may hold anything.
  std::uint32_t keep[2];
#pragma unroll
  for (int up = 0; up < 2; ++up) {
    const int row = 2 * t_ + 8 * up;
    keep[up] = (row >= first_row && row < last_row ? 0xFFFFU : 0U) |
               (row + 1 >= first_row && row + 1 < last_row ? 0xFFFF0000U : 0U);
  }
  const std::uint8_t* v = values();
  const std::uint32_t value_at =
      shared_address(v) +
      (((lane_ & 7) + 8 * (lane_ >> 4)) * T::kHeadDim + 8 * ((lane_ >> 3) & 1)) * 2;
#pragma unroll
  for (int m = 0; m < T::kValueGroups; ++m) {
    std::uint32_t a[4];
    load_matrix_transposed(a, value_at + 32 * m);
    a[0] &= keep[0];
    a[1] &= keep[0];
    a[2] &= keep[1];
    a[3] &= keep[1];
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
      mma_bf16(acc.output[n][m], a, high[n][0], high[n][1]);
      mma_bf16(acc.output[n][m], a, low[n][0], low[n][1]);
    }
  }
}

}  // namespace bitdecoding::cuda
