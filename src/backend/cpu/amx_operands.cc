// SPDX-License-Identifier: Apache-2.0
// Operands of the AMX kernels: queries, float tiles and tiles of FP4 pages as blocks of BF16.
#if defined(BITDECODING_AMX)

#include <cstring>

#include "backend/cpu/amx.h"
#include "page/layout.h"
#include "transform/hadamard.h"

BITDECODING_AMX_FUNCTIONS
namespace bitdecoding::cpu::amx {
namespace {

constexpr int kLanes = 16;

}  // namespace

void pack_right(const float* in, int depth, int columns, int terms, std::uint16_t* out) {
  // Lanes 0, 16, 1, 17, ...: two rows' columns side by side.
  alignas(64) std::uint16_t pairs[32];
  for (int i = 0; i < 16; ++i) {
    pairs[2 * i] = static_cast<std::uint16_t>(i);
    pairs[2 * i + 1] = static_cast<std::uint16_t>(i + 16);
  }
  const __m512i interleave = _mm512_load_si512(pairs);
  const std::int64_t term_values = std::int64_t{depth} * columns;
  for (int row = 0; row < depth; row += 2) {
    const float* first = in + std::int64_t{row} * columns;
    std::uint16_t* to =
        out + std::int64_t{row / 32} * (columns / 16) * kMatrixBlock + row % 32 / 2 * 32;
    for (int column = 0; column < columns; column += kLanes) {
      __m512 a = _mm512_loadu_ps(first + column);
      __m512 b = _mm512_loadu_ps(first + columns + column);
      std::uint16_t* block = to + column / 16 * kMatrixBlock;
      for (int term = 0; term < terms; ++term) {
        const __m512i bits = round_pair(&a, &b);
        _mm512_storeu_si512(block + term * term_values, _mm512_permutexvar_epi16(interleave, bits));
      }
    }
  }
}

// The power of two at or below `amax` and its reciprocal; 1 where there is none.
HWY_INLINE float power_below(float amax, float* reciprocal) {
  std::uint32_t bits;
  std::memcpy(&bits, &amax, sizeof bits);
  std::uint32_t exponent = bits >> 23;
  if (exponent == 0 || exponent == 255) exponent = 127;
  if (exponent == 254) exponent = 253;
  const std::uint32_t unit_bits = exponent << 23;
  const std::uint32_t reciprocal_bits = (254 - exponent) << 23;
  float unit;
  std::memcpy(&unit, &unit_bits, sizeof unit);
  std::memcpy(reciprocal, &reciprocal_bits, sizeof unit);
  return unit;
}

void pack_query(const float* in, int rows, int head_dim, int terms, std::uint16_t* out,
                float* unit) {
  const int padded = (rows + kMatrixRows - 1) / kMatrixRows * kMatrixRows;
  const int steps = head_dim / 32;
  for (int row = 0; row < padded; ++row) {
    std::uint16_t* to = out + std::int64_t{row / 16} * terms * steps * kMatrixBlock + row % 16 * 32;
    if (row >= rows) {
      for (int i = 0; i < terms * steps; ++i) {
        _mm512_storeu_si512(to + i * kMatrixBlock, _mm512_setzero_si512());
      }
      continue;
    }
    const float* q = in + std::int64_t{row} * head_dim;
    __m512 amax = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += kLanes) {
      amax = _mm512_max_ps(amax, _mm512_abs_ps(_mm512_loadu_ps(q + d)));
    }
    float reciprocal;
    unit[row] = power_below(_mm512_reduce_max_ps(amax), &reciprocal);
    const __m512 factor = _mm512_set1_ps(reciprocal);
    for (int step = 0; step < steps; ++step) {
      __m512 a = _mm512_mul_ps(_mm512_loadu_ps(q + 32 * step), factor);
      __m512 b = _mm512_mul_ps(_mm512_loadu_ps(q + 32 * step + kLanes), factor);
      for (int term = 0; term < terms; ++term) {
        _mm512_storeu_si512(to + (term * steps + step) * kMatrixBlock, round_pair(&a, &b));
      }
    }
  }
}

// Butterflies of a block of kVectors * 16 floats, in registers.
template <int kVectors>
HWY_INLINE void rotate_block(float* x) {
  __m512 v[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) v[i] = _mm512_loadu_ps(x + kLanes * i);
#pragma GCC unroll 4
  for (int stride = 1; stride < kLanes; stride *= 2) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i partner = _mm512_xor_si512(lane, _mm512_set1_epi32(stride));
    const __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(stride));
    const __m512 sign = _mm512_mask_blend_ps(upper, _mm512_set1_ps(1.0F), _mm512_set1_ps(-1.0F));
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      v[i] = _mm512_fmadd_ps(v[i], sign, _mm512_permutexvar_ps(partner, v[i]));
    }
  }
#pragma GCC unroll 4
  for (int stride = 1; stride < kVectors; stride *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if ((i & stride) != 0) continue;
      const __m512 a = v[i];
      v[i] = _mm512_add_ps(a, v[i + stride]);
      v[i + stride] = _mm512_sub_ps(a, v[i + stride]);
    }
  }
  const __m512 scale = _mm512_set1_ps(hadamard_scale(kVectors * kLanes));
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) _mm512_storeu_ps(x + kLanes * i, _mm512_mul_ps(v[i], scale));
}

void rotate(float* rows, int count, int head_dim) {
  const int block = hadamard_block(head_dim);
  const std::int64_t values = std::int64_t{count} * head_dim;
  for (std::int64_t i = 0; i < values; i += block) {
    switch (block) {
      case 32:
        rotate_block<2>(rows + i);
        break;
      case 64:
        rotate_block<4>(rows + i);
        break;
      case 128:
        rotate_block<8>(rows + i);
        break;
      default:
        rotate_block<16>(rows + i);
        break;
    }
  }
}

// ---- tiles of pages ----------------------------------------------------------------------------

alignas(64) constexpr float kE2m1Floats[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                               4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                               -2.0F, -3.0F, -4.0F, -6.0F};

// The scales of 16 rows (kQuad order: side by side).
template <bool kMx>
HWY_INLINE __m512 load_scales(const std::uint8_t* bytes) {
  const __m512i code =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  if constexpr (kMx) {
    const __m512i least = _mm512_set1_epi32(0x00400000);  // 2^-127
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(code, 23), least));
  }
  // E4M3's fields at their places in a float lack 120 in the exponent.
  const __m512i magnitude = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x7F)), 20);
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24);
  const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(0x1p120F));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
}

// Columns 2 i and 2 i + 1 (i = 0..3) of eight, as BF16 pairs, from the words of 16 rows: kQuad has
// column c < 4 in the low nibble of byte c and column c + 4 in the high one.
HWY_INLINE void decode_pairs(__m512i words, __m512 scale, __m512i (&pairs)[4]) {
  const __m512 table = _mm512_load_ps(kE2m1Floats);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int shift = i < 2 ? 16 * i : 16 * (i - 2) + 4;
    // Lookups use the low four bits of a lane.
    const __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(words, shift), table);
    const __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(words, shift + 8), table);
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(even, scale)), 16);
    const __m512i high = _mm512_castps_si512(_mm512_mul_ps(odd, scale));
    pairs[i] = _mm512_or_si512(low, _mm512_and_si512(high, upper));
  }
}

template <bool kMx>
HWY_INLINE void unpack_keys(int head_dim, const std::uint8_t* tile, std::uint16_t* key) {
  constexpr Format kFormat = kMx ? Format::kMxfp4 : Format::kNvfp4;
  constexpr int kScaleDims = kMx ? 32 : 16;
  constexpr std::int64_t kScaleBytes = layout::fragment_scale_bytes(kFormat);
  const layout::TileParts parts = layout::tile_parts(kFormat, head_dim);
  const std::int64_t column_blocks = layout::key_column_blocks(head_dim);
  // Two row groups' ranks -> 32 tokens in order: 4 of the even group, 4 of the odd one, in turn.
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second =
      _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  for (int half = 0; half < 2; ++half) {
    for (int dim = 0; dim < head_dim; dim += 8) {
      __m512i pairs[2][4];
      for (int odd = 0; odd < 2; ++odd) {
        const std::int64_t fragment = (2 * half + odd) * column_blocks + dim / 64;
        const __m512 scale = load_scales<kMx>(tile + parts.key_scales + fragment * kScaleBytes +
                                              16 * (dim % 64 / kScaleDims));
        const __m512i words = _mm512_loadu_si512(tile + parts.key_codes +
                                                 fragment * layout::kFragmentBytes + dim % 64 * 8);
        decode_pairs(words, scale, pairs[odd]);
      }
      std::uint16_t* to =
          key + std::int64_t{dim / 32 * 4 + 2 * half} * kMatrixBlock + dim % 32 / 2 * 32;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(to + 32 * i,
                            _mm512_permutex2var_epi32(pairs[0][i], first, pairs[1][i]));
        _mm512_storeu_si512(to + kMatrixBlock + 32 * i,
                            _mm512_permutex2var_epi32(pairs[0][i], second, pairs[1][i]));
      }
    }
  }
}

template <bool kMx>
HWY_INLINE void unpack_values(int head_dim, const std::uint8_t* tile, std::uint16_t* value) {
  constexpr Format kFormat = kMx ? Format::kMxfp4 : Format::kNvfp4;
  constexpr int kScaleTokens = kMx ? 32 : 16;
  const layout::TileParts parts = layout::tile_parts(kFormat, head_dim);
  const int columns = head_dim / 16;
  for (int column = 0; column < columns; ++column) {
    const std::uint8_t* codes =
        tile + parts.value_codes + std::int64_t{column} * layout::kFragmentBytes;
    const std::uint8_t* scales =
        tile + parts.value_scales + column * std::int64_t{layout::fragment_scale_bytes(kFormat)};
    for (int token = 0; token < kTileTokens; token += 8) {
      __m512i pairs[4];
      decode_pairs(_mm512_loadu_si512(codes + 8 * token),
                   load_scales<kMx>(scales + 16 * (token / kScaleTokens)), pairs);
      std::uint16_t* to =
          value + std::int64_t{token / 32 * columns + column} * kMatrixBlock + token % 32 / 2 * 32;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) _mm512_storeu_si512(to + 32 * i, pairs[i]);
    }
  }
}

void unpack_tile(Format format, int head_dim, const std::uint8_t* tile, std::uint16_t* key,
                 std::uint16_t* value) {
  if (format == Format::kMxfp4) {
    unpack_keys<true>(head_dim, tile, key);
    unpack_values<true>(head_dim, tile, value);
  } else {
    unpack_keys<false>(head_dim, tile, key);
    unpack_values<false>(head_dim, tile, value);
  }
}

}  // namespace bitdecoding::cpu::amx
HWY_POP_ATTRIBUTES

#endif
