// SPDX-License-Identifier: Apache-2.0
// What the files of the AMX kernels share. Include before any other header that includes Highway.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "backend/cpu/matrix_kernels.h"
#include "backend/cpu/targets.h"
// After targets.h, which decides what Highway may compile.
#include <hwy/base.h>

// Opens a region of functions that the compiler may use these instructions in; HWY_POP_ATTRIBUTES
// closes it. Nothing of the standard library may be instantiated inside.
#define BITDECODING_AMX_FUNCTIONS \
  HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

namespace bitdecoding::cpu::amx {

void pack_query(const float* in, int rows, int head_dim, int terms, std::uint16_t* out,
                float* unit);
void pack_right(const float* in, int depth, int columns, int terms, std::uint16_t* out);
void unpack_tile(Format format, int head_dim, const std::uint8_t* tile, std::uint16_t* key,
                 std::uint16_t* value);
void rotate(float* rows, int count, int head_dim);

BITDECODING_AMX_FUNCTIONS

HWY_INLINE __m512 upper_half_float(__m256i bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

// 32 floats -> 32 BF16 in order; what rounding took away stays in `low` and `high`.
HWY_INLINE __m512i round_pair(__m512* low, __m512* high) {
  const __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(*high, *low);
  *low = _mm512_sub_ps(*low, upper_half_float(_mm512_castsi512_si256(bits)));
  *high = _mm512_sub_ps(*high, upper_half_float(_mm512_extracti64x4_epi64(bits, 1)));
  return bits;
}

HWY_POP_ATTRIBUTES

}  // namespace bitdecoding::cpu::amx
