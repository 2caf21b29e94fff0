// SPDX-License-Identifier: Apache-2.0
// Tiles, queries and probabilities as integers: twice the values of E2M1 codes, four in a word, so
// that a block of 16 products is four integer dot products and exact.
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/plan.h"
#include "numeric/e2m1.h"
#include "page/layout.h"
#include "scale/rules.h"

namespace bitdecoding::cuda {

__device__ inline std::int32_t twice_value(std::uint8_t code) {
  return static_cast<std::int32_t>(2.0F * decode_e2m1(code));
}

// Magnitudes (codes 0..7, one a byte) and signs (bit 7 of each byte) as bytes of twice the value.
__device__ inline std::uint32_t twice_values(std::uint32_t magnitudes, std::uint32_t signs) {
  // The bytes become nibbles: PRMT looks four codes up at once.
  const std::uint32_t selector = __byte_perm(magnitudes | (magnitudes >> 4), 0, 0x4420);
  const std::uint32_t positive = __byte_perm(0x03020100U, 0x0C080604U, selector);
  const std::uint32_t negative = __byte_perm(0xFDFEFF00U, 0xF4F8FAFCU, selector);
  const std::uint32_t mask = ((signs & 0x80808080U) >> 7) * 255U;
  return (positive & ~mask) | (negative & mask);
}

// The eight codes of a kFp16Mma word: columns 0..3 and 4..7.
__device__ inline uint2 unpack_twice(std::uint32_t word) {
  return {twice_values((word >> 1) & 0x07070707U, word),
          twice_values(((word >> 3) & 0x06060606U) | (word & 0x01010101U), word << 1)};
}

__device__ inline std::int32_t dot16(const std::uint32_t* a, const std::uint32_t* b) {
  std::int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = __dp4a(static_cast<std::int32_t>(a[i]), static_cast<std::int32_t>(b[i]), sum);
  }
  return sum;
}

// One side of a tile in shared memory. K: a row a token, words along head_dim. V: a row a channel,
// words along tokens. Pitches are odd: neighbouring rows begin in different banks.
template <Format kFormat, int kHeadDim>
struct Fp4Tile {
  static constexpr layout::TileParts kParts = layout::tile_parts(kFormat, kHeadDim);
  static constexpr FragmentOrder kOrder = FragmentOrder::kFp16Mma;
  static constexpr int kBlock = scale_block(kFormat);
  static constexpr int kKeyPitch = kHeadDim / 4 + 1;
  static constexpr int kValuePitch = kTileTokens / 4 + 1;
  static constexpr int kKeyBlocks = kHeadDim / kBlock;
  static constexpr int kValueBlocks = kTileTokens / kBlock;
  static constexpr int kWords = kHeadDim * kValuePitch > kTileTokens* kKeyPitch
                                    ? kHeadDim* kValuePitch
                                    : kTileTokens* kKeyPitch;

  std::uint32_t words[kWords];
  float scales[kHeadDim * kTileTokens / kBlock];  // [block][row]

  __device__ void load_keys(const std::uint8_t* bytes, float outer) {
    for (int i = threadIdx.x; i < kTileTokens * kHeadDim / 8; i += blockDim.x) {
      const int token = i / (kHeadDim / 8);
      const int dim = i % (kHeadDim / 8) * 8;
      put(token * kKeyPitch + dim / 4, bytes,
          layout::key_code(kFormat, kOrder, kHeadDim, token, dim).byte);
    }
    for (int i = threadIdx.x; i < kTileTokens * kKeyBlocks; i += blockDim.x) {
      const std::int64_t at =
          layout::key_scale(kFormat, kOrder, kHeadDim, i % kTileTokens, i / kTileTokens * kBlock);
      scales[i] = decode_scale(kFormat, bytes[at]) * outer;
    }
  }
  __device__ void load_values(const std::uint8_t* bytes, float outer) {
    for (int i = threadIdx.x; i < kTileTokens * kHeadDim / 8; i += blockDim.x) {
      const int dim = i / (kTileTokens / 8);
      const int token = i % (kTileTokens / 8) * 8;
      put(dim * kValuePitch + token / 4, bytes,
          layout::value_code(kFormat, kOrder, kHeadDim, token, dim).byte);
    }
    for (int i = threadIdx.x; i < kHeadDim * kValueBlocks; i += blockDim.x) {
      const std::int64_t at =
          layout::value_scale(kFormat, kOrder, kHeadDim, i / kHeadDim * kBlock, i % kHeadDim);
      scales[i] = decode_scale(kFormat, bytes[at]) * outer;
    }
  }

 private:
  // A word of a tile is eight neighbouring columns of a row.
  __device__ void put(int index, const std::uint8_t* bytes, std::int64_t at) {
    const uint2 twice = unpack_twice(*reinterpret_cast<const std::uint32_t*>(bytes + at));
    words[index] = twice.x;
    words[index + 1] = twice.y;
  }
};

}  // namespace bitdecoding::cuda
