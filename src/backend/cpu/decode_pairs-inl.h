// Decode attention's two products where a vector holds 4 or 8 rows of four bytes (SSSE3, NEON,
// AVX2).
//
// Both products multiply a fragment (16 rows x 64 columns of codes) by a few rows of signed bytes
// along the columns. Rows i and i + 8 share a vector of two columns: int16 lane 2i belongs to row i
// and lane 2i + 1 to row i + 8, so eight PMADDUBSW and as many additions make the sums of 16
// columns, one a lane, with no pairwise addition; a shift and a mask make int32 of them (times
// 2^16). Codes are unsigned, 2k + 12 (0..24), and the bias -12 * sum(bytes) starts the lane. Lanes
// wrap on the way; the end is at most 12 * 127 * 16 = 24384 in magnitude, and a pair 24 * 127 * 2,
// so nothing saturates. The rows of bytes are stored broadcast ("wide"), so that they are memory
// operands. The multiplications bound the loop where there is one byte multiplier
// (docs/design/cpu.md).
#if defined(BITDECODING_CPU_DECODE_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_PAIRS_INL_H_
#undef BITDECODING_CPU_DECODE_PAIRS_INL_H_
#else
#define BITDECODING_CPU_DECODE_PAIRS_INL_H_
#endif

#include <hwy/cache_control.h>

#include <cstdint>
#include <cstring>

#include "backend/cpu/decode_common-inl.h"
#include "backend/cpu/decode_kernels.h"
#include "page/layout.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

inline constexpr float kPairUnit = 1.0F / 65536.0F;
// Vectors of a block of 16 columns of one row of bytes: the bias and eight pairs.
inline constexpr int kWideVectors = 9;
inline constexpr int kWideBytes = kWideVectors * kVectorBytes;

// Rows that one vector of pairs covers, twice kLanes, in a fragment of 16.
inline constexpr int kPairPasses = kLanes >= 8 ? 1 : 2;

struct PairBlock {
  VU8 pair[8];
};

HWY_INLINE PairBlock unpack_pairs(const std::uint8_t* HWY_RESTRICT codes, VU8 table) {
  const DU8 du8;
  const DU16 du16;
  const DU32 du32;
  const VU8 low_mask = hn::Set(du8, 0x0F);
  PairBlock block;
#pragma GCC unroll 2
  for (int chunk = 0; chunk < 2; ++chunk) {
    const auto x = hn::BitCast(du32, hn::LoadU(du8, codes + 64 * chunk));
    const auto y = hn::BitCast(du32, hn::LoadU(du8, codes + 64 * chunk + 32));
    const auto first = hn::OddEven(hn::BitCast(du16, hn::ShiftLeft<16>(y)), hn::BitCast(du16, x));
    const auto second = hn::OddEven(hn::BitCast(du16, y), hn::BitCast(du16, hn::ShiftRight<16>(x)));
    VU8* HWY_RESTRICT out = block.pair + 4 * chunk;
    out[0] = hn::TableLookupBytes(table, hn::And(hn::BitCast(du8, first), low_mask));
    out[1] = hn::TableLookupBytes(table, hn::And(hn::BitCast(du8, second), low_mask));
    out[2] =
        hn::TableLookupBytes(table, hn::And(hn::BitCast(du8, hn::ShiftRight<4>(first)), low_mask));
    out[3] =
        hn::TableLookupBytes(table, hn::And(hn::BitCast(du8, hn::ShiftRight<4>(second)), low_mask));
  }
  return block;
}

HWY_INLINE VI16 pair_product(VU8 codes, const std::uint8_t* HWY_RESTRICT wide) {
  return mul_pairs(codes, hn::BitCast(DI8(), hn::Load(DU8(), wide)));
}

HWY_INLINE VI32 multiply_pairs(const PairBlock& block, const std::uint8_t* HWY_RESTRICT wide) {
  const DI16 di16;
  VI16 sum = hn::Add(pair_product(block.pair[0], wide + kVectorBytes),
                     hn::BitCast(di16, hn::Load(DU8(), wide)));
#pragma GCC unroll 8
  for (int j = 1; j < 8; ++j) {
    sum = hn::Add(sum, pair_product(block.pair[j], wide + (j + 1) * kVectorBytes));
  }
  return hn::BitCast(DI32(), sum);
}

HWY_INLINE VF even_lanes(VI32 sums) { return hn::ConvertTo(DF(), hn::ShiftLeft<16>(sums)); }
HWY_INLINE VF odd_lanes(VI32 sums) {
  const DI32 di32;
  return hn::ConvertTo(DF(), hn::And(sums, hn::Set(di32, static_cast<std::int32_t>(0xFFFF0000U))));
}

// What multiply_fragments reads and writes. Fragments lie in `groups` runs of `stride` blocks of 16
// columns each, of which the first `blocks` count.
struct FragmentRun {
  const std::uint8_t* codes;
  const float* scales;        // 16 floats a block (two blocks of MX)
  const std::uint8_t* wide;   // [blocks][work][kWideBytes]
  const std::uint8_t* ahead;  // as far past `codes` as the tile to fetch next, or null
  int groups, blocks, stride;
  float* sums;  // [row][row_stride]; group g adds to 16 of them at 16 * g. In units of kPairUnit
  int row_stride;
};

template <int R, int kTerms, bool kMx>
HWY_INLINE void multiply_fragments(const FragmentRun& run) {
  const DF df;
  const VU8 table = e2m1_table(12);
  float* HWY_RESTRICT const sums = run.sums;
  for (int group = 0; group < run.groups; ++group) {
    for (int pass = 0; pass < kPairPasses; ++pass) {
      const std::uint8_t* HWY_RESTRICT wide = run.wide;
#pragma GCC unroll 1
      for (int b = 0; b < run.blocks; ++b) {
        const int at = group * run.stride + b;
        if (run.ahead != nullptr && pass == 0) {
          hwy::Prefetch(run.ahead + 128 * at);
          hwy::Prefetch(run.ahead + 128 * at + 64);
        }
        const PairBlock block = unpack_pairs(run.codes + 128 * at + kVectorBytes * pass, table);
        const float* HWY_RESTRICT scales = run.scales + 16 * (kMx ? at / 2 : at) + kLanes * pass;
        float* HWY_RESTRICT even = sums + 16 * group + kLanes * pass;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r, even += run.row_stride) {
          const VI32 high = multiply_pairs(block, wide);
          VF a = even_lanes(high);
          VF c = odd_lanes(high);
          wide += kWideBytes;
          if constexpr (kTerms == 2) {
            const VI32 low = multiply_pairs(block, wide);
            const VF weight = hn::Set(df, static_cast<float>(kTermWeight));
            a = hn::MulAdd(a, weight, even_lanes(low));
            c = hn::MulAdd(c, weight, odd_lanes(low));
            wide += kWideBytes;
          }
          hn::Store(hn::MulAdd(a, hn::Load(df, scales), hn::Load(df, even)), df, even);
          hn::Store(hn::MulAdd(c, hn::Load(df, scales + 8), hn::Load(df, even + 8)), df, even + 8);
        }
      }
    }
  }
}

template <bool kMx>
HWY_INLINE void convert_scales(const std::uint8_t* HWY_RESTRICT bytes, std::int64_t count,
                               float* HWY_RESTRICT out) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    hn::Store(load_scales<kMx>(bytes + i), DF(), out + i);
  }
}

HWY_INLINE void store_wide(std::uint32_t two_pairs, std::uint8_t* HWY_RESTRICT out) {
  const DU16 du16;
  const DU8 du8;
  hn::Store(hn::BitCast(du8, hn::Set(du16, static_cast<std::uint16_t>(two_pairs))), du8, out);
  hn::Store(hn::BitCast(du8, hn::Set(du16, static_cast<std::uint16_t>(two_pairs >> 16))), du8,
            out + kVectorBytes);
}

// The query's rows, broadcast.
inline void widen_query(int head_dim, const DecodeQuery& query, std::uint8_t* HWY_RESTRICT out) {
  const DU16 du16;
  const DU8 du8;
  const int work = query.rows * query.terms;
  for (int b = 0; b < layout::key_column_blocks(head_dim) * 4; ++b) {
    for (int w = 0; w < work; ++w, out += kWideBytes) {
      hn::Store(
          hn::BitCast(du8, hn::Set(du16, static_cast<std::uint16_t>(query.bias[b * work + w]))),
          du8, out);
      for (int i = 0; i < 4; ++i) {
        store_wide(static_cast<std::uint32_t>(query.quads[(b * 4 + i) * work + w]),
                   out + (1 + 2 * i) * kVectorBytes);
      }
    }
  }
}

// 64 levels of one row and term in kQuad order, with the sums of 8 each: written broadcast, in
// token order; blocks are `stride` bytes apart.
HWY_INLINE void widen_levels(const std::uint8_t* HWY_RESTRICT levels,
                             const std::uint64_t* HWY_RESTRICT sums, std::uint8_t* HWY_RESTRICT out,
                             std::int64_t stride) {
  const DU16 du16;
  const DU8 du8;
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {  // the block's tokens are 8 ranks each of two row groups
    const std::uint64_t sum = sums[4 * (b / 2) + b % 2] + sums[4 * (b / 2) + 2 + b % 2];
    hn::Store(
        hn::BitCast(du8, hn::Set(du16, static_cast<std::uint16_t>(-12 * static_cast<int>(sum)))),
        du8, out + b * stride);
  }
#pragma GCC unroll 16
  for (int q = 0; q < 16; ++q) {
    const int token = quad_token(4 * q);
    std::uint32_t quad;
    std::memcpy(&quad, levels + 4 * q, 4);
    store_wide(quad, out + (token / 16) * stride + (1 + (token % 16) / 2) * kVectorBytes);
  }
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
