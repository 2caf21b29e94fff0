// SPDX-License-Identifier: Apache-2.0
// Decode attention's two products over the fragments of a tile, for targets that add dot products
// of four bytes into 32 bits (VPDPBUSD). Per-target; decode_pairs-inl.h has the same for the
// others.
//
// A fragment (16 rows x 64 columns of codes) is multiplied along its columns by a few rows of
// signed bytes, the query or the probabilities. A lane is a fragment row: a vector of codes holds
// eight of its columns, one look-up makes four of them unsigned bytes 2k + 12 (0..24), and one
// instruction multiplies them by four bytes that a broadcast from memory gives to all lanes. The
// bias -12 * sum(bytes) starts a block's sum, which is exact; it then meets its block scale in
// float.
//
// Cost model, vector instructions for 16 x 16 codes and W rows of bytes (terms count): 6 to unpack,
// 4 W products, 5 for the scales, 2 W to convert and add: at W = 4, 35 on two ports, 15 codes a
// clock.
#if defined(BITDECODING_CPU_DECODE_DOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_DOTS_INL_H_
#undef BITDECODING_CPU_DECODE_DOTS_INL_H_
#else
#define BITDECODING_CPU_DECODE_DOTS_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "backend/cpu/decode_kernels.h"
#include "backend/cpu/ops-inl.h"
#include "page/layout.h"

#if HWY_TARGET == HWY_AVX3_DL
HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

// Rows times terms of one pass: what fits the registers.
inline constexpr int kTargetWork = 8;
// With two terms the high one counts this often.
inline constexpr int kTermWeight = 128;
// Bytes of codes of 16 rows x 16 columns, and of 16 x 8.
inline constexpr int kBlockBytes = 128;
inline constexpr int kChunkBytes = 64;

// Four signed bytes of each of `work` rows: where quad q (columns 4 q .. 4 q + 3) of row w is.
struct QueryBytes {
  const std::int32_t* quads;  // [quads][work]
  template <int kWork>
  HWY_INLINE const void* at(int quad, int w) const {
    return quads + quad * kWork + w;
  }
};
// Levels in kQuad order: four tokens stay together, fours of the two row groups of a half take
// turns.
struct LevelBytes {
  const std::uint8_t* levels;  // [work][64]
  template <int kWork>
  HWY_INLINE const void* at(int quad, int w) const {
    const int position = 4 * (2 * (quad / 8) + quad % 2) + quad % 8 / 2;
    return levels + 64 * w + 4 * position;
  }
};

template <class Bytes>
struct DotRun {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  Bytes bytes;
  const std::int32_t* bias;         // [scale blocks][work]
  const std::uint8_t* ahead_codes;  // to fetch into the cache, in the same places, or null
  const std::uint8_t* ahead_scales;
  int groups, blocks, stride;  // fragment rows / 16, blocks of 16 columns that count, and in all
  float* out;                  // [rows][row_stride], 16 floats a group
  int row_stride;
  const float* keep;  // [rows] each, for kAccumulate
  const float* weight;
};

template <bool kMx>
HWY_INLINE VF load_scales(const std::uint8_t* HWY_RESTRICT p) {
  if constexpr (kMx) {
    return load_e8m0(p);
  } else {
    return load_e4m3(p);
  }
}

// Into the second-level cache: the first level's few miss buffers are then free for the tile at
// hand (14 % faster from DRAM than into the first level, equal from a third-level cache).
HWY_INLINE void prefetch_next(const std::uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// Twice the E2M1 values plus 12, four times over: the upper bits of an index do not count.
HWY_INLINE VU8 code_table() { return e2m1_table(12); }

// Adds scale * (codes . bytes) of one scale block to sum[rows].
template <int R, int kTerms, bool kMx, class Bytes>
HWY_INLINE void add_block(const DotRun<Bytes>& run, const std::uint8_t* HWY_RESTRICT codes,
                          const std::uint8_t* HWY_RESTRICT scales, int block, VU8 table,
                          VF (&sum)[R]) {
  constexpr int kWork = R * kTerms;
  constexpr int kChunks = kMx ? 4 : 2;
  const DU8 du8;
  const DU16 du16;
  VI32 dots[kWork];
#pragma GCC unroll 8
  for (int w = 0; w < kWork; ++w) dots[w] = hn::Set(DI32(), run.bias[block * kWork + w]);
#pragma GCC unroll 4
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const VU8 words = hn::LoadU(du8, codes + kChunkBytes * chunk);
    const VU8 low = look_up_bytes(table, words);
    const VU8 high =
        look_up_bytes(table, hn::BitCast(du8, hn::ShiftRight<4>(hn::BitCast(du16, words))));
    const int quad = 2 * (kChunks * block + chunk);
#pragma GCC unroll 8
    for (int w = 0; w < kWork; ++w) {
      dots[w] = add_dots(dots[w], low, run.bytes.template at<kWork>(quad, w));
    }
#pragma GCC unroll 8
    for (int w = 0; w < kWork; ++w) {
      dots[w] = add_dots(dots[w], high, run.bytes.template at<kWork>(quad + 1, w));
    }
  }
  const VF scale = load_scales<kMx>(scales);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    VI32 dot = dots[r * kTerms];
    if constexpr (kTerms == 2) dot = hn::Add(hn::ShiftLeft<7>(dot), dots[r * kTerms + kTerms - 1]);
    sum[r] = hn::MulAdd(hn::ConvertTo(DF(), dot), scale, sum[r]);
  }
}

// out = sums, or (kAccumulate) out = out * keep + sums * weight.
template <int R, int kTerms, bool kMx, bool kAccumulate, class Bytes>
HWY_INLINE void multiply_fragments(const DotRun<Bytes>& run) {
  constexpr int kColumns = kMx ? 2 : 1;  // blocks of 16 that share a scale
  static_assert(kTermWeight == 1 << 7);
  static_assert(kLanes == 16);
  const DF df;
  const VU8 table = code_table();
  for (int group = 0; group < run.groups; ++group) {
    const std::int64_t first = std::int64_t{kBlockBytes} * group * run.stride;
    const std::int64_t first_scale = std::int64_t{16} * (group * run.stride / kColumns);
    VF sum[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r] = hn::Zero(df);
    if (run.ahead_scales != nullptr) prefetch_next(run.ahead_scales + first_scale);
    // A tile's tokens are four blocks; a constant lets the compiler place their operands.
    const int blocks = (kAccumulate ? 4 : run.blocks) / kColumns;
#pragma GCC unroll 4
    for (int block = 0; block < blocks; ++block) {
      const std::int64_t at = first + std::int64_t{kBlockBytes} * kColumns * block;
      if (run.ahead_codes != nullptr) {
        for (int line = 0; line < kBlockBytes * kColumns; line += 64) {
          prefetch_next(run.ahead_codes + at + line);
        }
      }
      add_block<R, kTerms, kMx>(run, run.codes + at, run.scales + first_scale + 16 * block, block,
                                table, sum);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* HWY_RESTRICT out = run.out + std::int64_t{r} * run.row_stride + 16 * group;
      VF x = sum[r];
      if constexpr (kAccumulate) {
        const VF old = hn::Mul(hn::LoadU(df, out), hn::Set(df, run.keep[r]));
        x = hn::MulAdd(x, hn::Set(df, run.weight[r]), old);
      }
      hn::StoreU(x, df, out);
    }
  }
}

// ---- the two products of a tile ----------------------------------------------------------------

// Beside the quads the kernel reads 32-bit biases, one a scale block.
inline std::int64_t wide_query_bytes(int head_dim, int work) {
  return std::int64_t{4} * layout::key_column_blocks(head_dim) * work * 4;
}

// DecodeQuery's biases are of blocks of 16 columns, in the low halves of words.
inline void widen_query(int head_dim, const DecodeQuery& query, std::uint8_t* HWY_RESTRICT out) {
  const int count = 4 * layout::key_column_blocks(head_dim) * query.rows * query.terms;
  for (int i = 0; i < count; ++i) {
    const auto bias = static_cast<std::int32_t>(static_cast<std::int16_t>(query.bias[i] & 0xFFFF));
    std::memcpy(out + 4 * std::int64_t{i}, &bias, sizeof bias);
  }
}

// Sums of `columns` neighbouring blocks' biases.
template <int kWork>
HWY_INLINE void merge_bias(int blocks, std::int32_t* HWY_RESTRICT bias) {
  for (int b = 0; b < blocks / 2; ++b) {
    for (int w = 0; w < kWork; ++w) {
      bias[b * kWork + w] = bias[2 * b * kWork + w] + bias[(2 * b + 1) * kWork + w];
    }
  }
}

template <int R, int kTerms, bool kMx>
HWY_INLINE void tile_scores(const DecodeContext& context, const DecodeQuery& query,
                            const DecodeTile& tile, float* HWY_RESTRICT sums) {
  constexpr int kWork = R * kTerms;
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  const int stride = 4 * layout::key_column_blocks(context.head_dim);
  const int blocks = (context.head_dim + 31) / 32 * 2;
  alignas(64) std::int32_t own[kMaxHeadDim / 16 * kWork];
  const auto* bias = reinterpret_cast<const std::int32_t*>(query.wide);
  if (bias == nullptr || kMx) {
    widen_query(context.head_dim, query, reinterpret_cast<std::uint8_t*>(own));
    if constexpr (kMx) merge_bias<kWork>(stride, own);
    bias = own;
  }
  const std::uint8_t* ahead = tile.prefetch;
  multiply_fragments<R, kTerms, kMx, false>(DotRun<QueryBytes>{
      tile.tile + parts.key_codes, tile.tile + parts.key_scales, QueryBytes{query.quads}, bias,
      ahead == nullptr ? nullptr : ahead + parts.key_codes,
      ahead == nullptr ? nullptr : ahead + parts.key_scales, 4, blocks, stride, sums, kTileTokens,
      nullptr, nullptr});
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
  alignas(64) std::int32_t bias[4 * kWork];
  for (int b = 0; b < 4; ++b) {
    for (int w = 0; w < kWork; ++w) {
      // Eight levels a sum: half a block of one row group, and as many of the next.
      const std::uint64_t* s = level_sums + 8 * w + 4 * (b / 2) + b % 2;
      bias[b * kWork + w] = -12 * static_cast<std::int32_t>(s[0] + s[2]);
    }
  }
  if constexpr (kMx) merge_bias<kWork>(4, bias);
  const std::uint8_t* ahead = tile.prefetch;
  multiply_fragments<R, kTerms, kMx, true>(DotRun<LevelBytes>{
      tile.tile + parts.value_codes, value_scales, LevelBytes{levels}, bias,
      ahead == nullptr ? nullptr : ahead + parts.value_codes,
      ahead == nullptr ? nullptr : ahead + parts.value_scales,
      layout::value_dim_groups(context.head_dim), 4, 4, out, context.head_dim, keep, weight});
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#endif  // per-target include guard
