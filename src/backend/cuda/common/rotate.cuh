// SPDX-License-Identifier: Apache-2.0
// The Hadamard rotation by lanes of a warp, in the order of transform/hadamard.h: the same bits.
#pragma once

#include <cstdint>

#include "transform/hadamard.h"

namespace bitdecoding::cuda {

// A part of kPart channels that kPart / kEach neighbouring lanes hold, kEach neighbours each. All
// lanes of the warp take part.
template <int kPart, int kEach>
__device__ inline void rotate_part(float (&x)[kEach]) {
  const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
  for (int stride = 1; stride < kEach; stride *= 2) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if ((e & stride) != 0) continue;
      const float a = x[e];
      const float b = x[e + stride];
      x[e] = a + b;
      x[e + stride] = a - b;
    }
  }
#pragma unroll
  for (int step = 1; step < kPart / kEach; step *= 2) {
    // Lower lanes add, upper ones subtract: the product with the sign is exact.
    const float sign = (lane & step) == 0 ? 1.0F : -1.0F;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      x[e] = __fmaf_rn(x[e], sign, __shfl_xor_sync(0xFFFFFFFFU, x[e], step));
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) x[e] *= hadamard_scale(kPart);
}

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
#pragma unroll
    for (int part = 0; part < kParts; ++part) rotate_part<kPart>(x[part]);
  }
};

}  // namespace bitdecoding::cuda
