// SPDX-License-Identifier: Apache-2.0
// The Hadamard rotation of one row by a warp, in the order of transform/hadamard.h: the same bits.
#pragma once

#include <cstdint>

#include "transform/hadamard.h"

namespace bitdecoding::cuda {

// How a warp holds a row: parts of the largest power of two that divides head_dim, of each a lane
// has kEach neighbours. Channel of element e: part * kPart + lane * kEach + e.
template <int kHeadDim>
struct LaneRow {
  static constexpr int kPart = hadamard_block(kHeadDim);
  static constexpr int kParts = kHeadDim / kPart;
  static constexpr int kEach = kPart / 32;
  float x[kParts][kEach];

  __device__ static int dim(int part, int e) {
    return part * kPart + static_cast<int>(threadIdx.x & 31) * kEach + e;
  }

  __device__ void rotate() {
    const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float(&row)[kEach] = x[part];
#pragma unroll
      for (int stride = 1; stride < kEach; stride *= 2) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          if ((e & stride) != 0) continue;
          const float a = row[e];
          const float b = row[e + stride];
          row[e] = a + b;
          row[e + stride] = a - b;
        }
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float other = __shfl_xor_sync(0xFFFFFFFFU, row[e], step);
          row[e] = (lane & step) == 0 ? row[e] + other : other - row[e];
        }
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) row[e] *= hadamard_scale(kPart);
    }
  }
};

}  // namespace bitdecoding::cuda
