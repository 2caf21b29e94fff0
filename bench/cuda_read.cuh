// SPDX-License-Identifier: Apache-2.0
// The most that a GPU's memory gives to plain reads of 16 bytes a thread.
#pragma once

#include <cstdint>

namespace bitdecoding::bench {

inline __global__ void read_all(const uint4* data, std::int64_t n, std::uint32_t* sink) {
  std::uint32_t sum = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 a = __ldcs(data + i);
    const uint4 b = __ldcs(data + i + step);
    const uint4 c = __ldcs(data + i + 2 * step);
    const uint4 d = __ldcs(data + i + 3 * step);
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^
           d.w;
  }
  if (sum == 0x12345678U) *sink = sum;
}

}  // namespace bitdecoding::bench
