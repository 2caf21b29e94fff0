// SPDX-License-Identifier: Apache-2.0
// Decode attention's two products over the fragments of a tile. Per-target.
//
// A fragment (16 rows x 64 columns of codes) is multiplied along its columns by a few rows of
// signed bytes, the query or the probabilities. Two blocks of 16 columns go together: int16 lane 2i
// holds the block b sum of row i and lane 2i + 1 that of block b + 1. Eight PMADDUBSW (two columns
// each) and as many additions make these sums; one PMADDWD multiplies both by their block scales
// and adds them, in int32, over all blocks of the row. So a row of bytes costs 18 instructions for
// 32 columns, and there is one conversion to float a fragment row.
//
// Block scales are integers (decode_scales-inl.h). Codes are unsigned, 2k + 12 (0..24), and the
// bias -12 * sum(bytes) starts the lane. A lane wraps on the way; its end is at most 12 * 127 * 16
// = 24384 in magnitude. A pair is at most 24 * 127 * 2, so PMADDUBSW does not saturate; an int32
// sum is at most 24384 * 1.875 * 2^bits * blocks < 2^31. The rows of bytes are stored broadcast
// ("wide"), so that they are memory operands.
#if defined(BITDECODING_CPU_DECODE_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_PAIRS_INL_H_
#undef BITDECODING_CPU_DECODE_PAIRS_INL_H_
#else
#define BITDECODING_CPU_DECODE_PAIRS_INL_H_
#endif

#include <hwy/cache_control.h>

#include <cstdint>

#include "backend/cpu/decode_kernels.h"
#include "backend/cpu/decode_scales-inl.h"
#include "backend/cpu/ops-inl.h"
#include "page/layout.h"

#if HWY_TARGET != HWY_AVX3_DL
HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

// Rows times terms of one pass: what fits the registers.
inline constexpr int kTargetWork = 4;
// With two terms the high one counts this often.
inline constexpr int kTermWeight = 128;
// Vectors of two blocks of one row of bytes: the bias and eight pairs of columns.
inline constexpr int kWideVectors = 9;
inline constexpr int kWideBytes = kWideVectors * kVectorBytes;
// Bytes of two blocks' codes.
inline constexpr int kTwoBlocks = 256;

struct PairBlock {
  VU8 pair[8];
};

// Columns 2j and 2j + 1 of two blocks: word 2i of pair[j] has row i of the first, word 2i + 1 of
// the second.
HWY_INLINE PairBlock unpack_pairs(const std::uint8_t* HWY_RESTRICT codes, VU8 table) {
  const DU8 du8;
  const DU16 du16;
  const DU32 du32;
  const VU8 low_mask = hn::Set(du8, 0x0F);
  PairBlock block;
#pragma GCC unroll 2
  for (int chunk = 0; chunk < 2; ++chunk) {
    const auto x = hn::BitCast(du32, hn::LoadU(du8, codes + 64 * chunk));
    const auto y = hn::BitCast(du32, hn::LoadU(du8, codes + 64 * chunk + kTwoBlocks / 2));
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

HWY_INLINE VI16 multiply_pairs(const PairBlock& block, const std::uint8_t* HWY_RESTRICT wide) {
  VI16 sum = hn::Add(pair_product(block.pair[0], wide + kVectorBytes),
                     hn::BitCast(DI16(), hn::Load(DU8(), wide)));
#pragma GCC unroll 8
  for (int j = 1; j < 8; ++j) {
    sum = hn::Add(sum, pair_product(block.pair[j], wide + (j + 1) * kVectorBytes));
  }
  return sum;
}

// Fragments in `groups` runs of `stride` blocks of 16 columns each, of which the first `blocks` (an
// even number) count.
struct FragmentRun {
  const std::uint8_t* codes;
  const std::int32_t* scales;  // [groups][blocks / 2][16 rows]: two int16, of two blocks
  const float* units;          // [groups][16 rows]: what the integers are multiplied by
  const std::uint8_t* wide;    // [blocks / 2][rows * terms][kWideBytes]
  const std::uint8_t* ahead;   // codes to fetch into the cache, in the same places, or null
  int groups, blocks, stride;
  float* out;  // [rows][row_stride], 16 floats a group
  int row_stride;
  const float* keep;  // [rows] each, for kAccumulate
  const float* weight;
};

// out = sums, or (kAccumulate) out = out * keep + sums * weight.
template <int R, int kTerms, bool kAccumulate>
HWY_INLINE void multiply_fragments(const FragmentRun& run) {
  constexpr int kWork = R * kTerms;
  const DF df;
  const DI32 di32;
  const VU8 table = e2m1_table(12);
  const int pairs = run.blocks / 2;
  for (int group = 0; group < run.groups; ++group) {
    for (int pass = 0; pass < kRowVectors; ++pass) {
      const std::uint8_t* HWY_RESTRICT wide = run.wide;
      const std::int64_t first = std::int64_t{64} * 2 * group * run.stride;
      VI32 sum[kWork];
#pragma GCC unroll 4
      for (int w = 0; w < kWork; ++w) sum[w] = hn::Zero(di32);
#pragma GCC unroll 1
      for (int b = 0; b < pairs; ++b) {
        const std::int64_t at = first + kTwoBlocks * b;
        if (run.ahead != nullptr) {
          for (int line = 0; line < kTwoBlocks; line += 64 * kRowVectors) {
            hwy::Prefetch(run.ahead + at + line + 64 * pass);
          }
        }
        const PairBlock block = unpack_pairs(run.codes + at + kVectorBytes * pass, table);
        const VI16 scale = hn::BitCast(
            DI16(), hn::Load(di32, run.scales + 16 * (group * pairs + b) + kLanes * pass));
#pragma GCC unroll 4
        for (int w = 0; w < kWork; ++w, wide += kWideBytes) {
          sum[w] = hn::Add(sum[w], mul_add_pairs(multiply_pairs(block, wide), scale));
        }
      }
      const VF unit = hn::Load(df, run.units + 16 * group + kLanes * pass);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        float* HWY_RESTRICT out =
            run.out + std::int64_t{r} * run.row_stride + 16 * group + kLanes * pass;
        VF x = hn::ConvertTo(df, sum[r * kTerms]);
        if constexpr (kTerms == 2) {
          x = hn::MulAdd(x, hn::Set(df, static_cast<float>(kTermWeight)),
                         hn::ConvertTo(df, sum[r * kTerms + kTerms - 1]));
        }
        x = hn::Mul(x, unit);
        if constexpr (kAccumulate) {
          const VF old = hn::Mul(hn::LoadU(df, out), hn::Set(df, run.keep[r]));
          x = hn::MulAdd(x, hn::Set(df, run.weight[r]), old);
        }
        hn::StoreU(x, df, out);
      }
    }
  }
}

HWY_INLINE void store_wide(std::uint32_t word, std::uint8_t* HWY_RESTRICT out) {
  const DU8 du8;
  hn::Store(hn::BitCast(du8, hn::Set(DU32(), word)), du8, out);
}

// Rows of query bytes, broadcast.
inline void widen_query(int head_dim, const DecodeQuery& query, std::uint8_t* HWY_RESTRICT out) {
  const int work = query.rows * query.terms;
  for (int b = 0; b < layout::key_column_blocks(head_dim) * 4; b += 2) {
    for (int w = 0; w < work; ++w, out += kWideBytes) {
      const auto bias = [&](int i) {
        return static_cast<std::uint32_t>(query.bias[(b + i) * work + w]);
      };
      const auto quad = [&](int i, int q) {
        return static_cast<std::uint32_t>(query.quads[((b + i) * 4 + q) * work + w]);
      };
      store_wide((bias(0) & 0xFFFFU) | bias(1) << 16, out);
      for (int q = 0; q < 4; ++q) {
        store_wide((quad(0, q) & 0xFFFFU) | quad(1, q) << 16, out + (1 + 2 * q) * kVectorBytes);
        store_wide(quad(0, q) >> 16 | (quad(1, q) & 0xFFFF0000U), out + (2 + 2 * q) * kVectorBytes);
      }
    }
  }
}

// 64 levels of one row and term in kQuad order, with the sums of 8 each: written broadcast, in
// token order; pairs of blocks are `stride` bytes apart.
HWY_INLINE void widen_levels(const std::uint8_t* HWY_RESTRICT levels,
                             const std::uint64_t* HWY_RESTRICT sums, std::uint8_t* HWY_RESTRICT out,
                             std::int64_t stride) {
  const hn::FixedTag<std::uint8_t, 16> du8;
  const hn::Repartition<std::uint16_t, decltype(du8)> du16;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, out += stride) {  // 32 tokens, two row groups
    const std::uint64_t* HWY_RESTRICT s = sums + 4 * half;
    const std::uint32_t first = static_cast<std::uint32_t>(s[0] + s[2]);
    const std::uint32_t second = static_cast<std::uint32_t>(s[1] + s[3]);
    store_wide((0U - 12U * first) % 65536U | (0U - 12U * second) << 16, out);
#pragma GCC unroll 2
    for (int group = 0; group < 2; ++group) {
      // Four units of four tokens, 8 apart: the first two are of one block, the others of the next.
      const auto units = hn::BitCast(du16, hn::LoadU(du8, levels + 32 * half + 16 * group));
      alignas(16) std::uint32_t words[4];
      hn::Store(
          hn::BitCast(du8, hn::InterleaveLower(du16, units, hn::ShiftRightBytes<8>(du16, units))),
          du8, reinterpret_cast<std::uint8_t*>(words));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        store_wide(words[i], out + (1 + 2 * group + i % 2 + 4 * (i / 2)) * kVectorBytes);
      }
    }
  }
}

// ---- the two products of a tile
// ------------------------------------------------------------------

// Bytes of the query's broadcast form.
inline std::int64_t wide_query_bytes(int head_dim, int work) {
  return std::int64_t{2} * layout::key_column_blocks(head_dim) * work * kWideBytes;
}

template <int R, int kTerms, bool kMx>
HWY_INLINE void tile_scores(const DecodeContext& context, const DecodeQuery& query,
                            const DecodeTile& tile, float* HWY_RESTRICT sums) {
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  const int stride = 4 * layout::key_column_blocks(context.head_dim);
  const int blocks = (context.head_dim + 31) / 32 * 2;
  alignas(64) std::int32_t scales[4 * kMaxHeadDim / 2];
  alignas(64) float units[kTileTokens];
  make_scales<kTerms, kMx>(tile.tile + parts.key_scales, 4, blocks, stride, scales, units);
  alignas(64) std::uint8_t own[kMaxHeadDim / 32 * R * kTerms * kWideBytes];
  const std::uint8_t* wide = query.wide;
  if (wide == nullptr) {
    widen_query(context.head_dim, query, own);
    wide = own;
  }
  const std::uint8_t* ahead = tile.prefetch == nullptr ? nullptr : tile.prefetch + parts.key_codes;
  multiply_fragments<R, kTerms, false>({tile.tile + parts.key_codes, scales, units, wide, ahead, 4,
                                        blocks, stride, sums, kTileTokens, nullptr, nullptr});
}

// out[r] = out[r] * keep[r] + weight[r] * (P . V) for R rows; `value_scales` is the tile's own or a
// copy with the blocks that the rows do not see set to 0.
template <int R, int kTerms, bool kMx>
HWY_INLINE void tile_values(const DecodeContext& context, const DecodeTile& tile,
                            const std::uint8_t* HWY_RESTRICT value_scales,
                            const std::uint8_t* HWY_RESTRICT levels,
                            const std::uint64_t* HWY_RESTRICT level_sums, const float* keep,
                            const float* weight, float* HWY_RESTRICT out) {
  constexpr int kWork = R * kTerms;
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  alignas(64) std::int32_t scales[4 * kMaxHeadDim / 2];
  alignas(64) float units[kMaxHeadDim];
  const int groups = layout::value_dim_groups(context.head_dim);
  make_scales<kTerms, kMx>(value_scales, groups, 4, 4, scales, units);
  alignas(64) std::uint8_t wide[2 * kWork * kWideBytes];
  for (int w = 0; w < kWork; ++w) {
    widen_levels(levels + 64 * w, level_sums + 8 * w, wide + w * kWideBytes,
                 std::int64_t{kWork} * kWideBytes);
  }
  const std::uint8_t* ahead =
      tile.prefetch == nullptr ? nullptr : tile.prefetch + parts.value_codes;
  multiply_fragments<R, kTerms, true>({tile.tile + parts.value_codes, scales, units, wide, ahead,
                                       groups, 4, 4, out, context.head_dim, keep, weight});
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#endif  // per-target include guard
