// SPDX-License-Identifier: Apache-2.0
// Decode attention over one tile of kQuad pages, per-target: scores, softmax over the tile, values.
//
// The products (decode_dots-inl.h where the target multiplies four bytes at a time, else
// decode_pairs-inl.h) are integer. With two terms the high one counts 128 times.
// Probabilities are integers 0..127 (0..16383) relative to the tile's own maximum.
#if defined(BITDECODING_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_INL_H_
#undef BITDECODING_CPU_DECODE_INL_H_
#else
#define BITDECODING_CPU_DECODE_INL_H_
#endif

#include <cstring>
#include <limits>
#include <utility>

#include "backend/cpu/decode_dots-inl.h"
#include "backend/cpu/decode_kernels.h"
#include "backend/cpu/decode_pairs-inl.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "page/layout.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

// Tile token of position i in kQuad order: row group i / 16, rank i % 16.
constexpr int quad_token(int i) {
  const int group = i / 16;
  const int rank = i % 16;
  return 32 * (group / 2) + 8 * (rank / 4) + 4 * (group % 2) + rank % 4;
}

// Levels of probability 1.
template <int kTerms>
inline constexpr float kLevels = kTerms == 1 ? 127.0F : 127.0F * kTermWeight + 127.0F;

// kLevels * 2^t for t <= 0, as the nearest integer. Below t = -40 it is 0 for every number of
// levels here. One term has 127 levels: a cubic (relative error 7.5e-5, a hundredth of a level) is
// enough. Two have 16383: degree 5 (7.5e-8, below float's own rounding). Both are minimax on [-0.5,
// 0.5].
template <int kTerms>
HWY_INLINE VI32 exp2_levels(VF t) {
  const DF df;
  const DI32 di32;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const VF magic = hn::Set(df, 12582912.0F);
  const VF x = hn::Max(t, hn::Set(df, -40.0F));
  const VF shifted = hn::Add(x, magic);
  const VF f = hn::Sub(x, hn::Sub(shifted, magic));
  VF p;
  if constexpr (kTerms == 1) {
    constexpr float kScale = kLevels<1>;
    p = hn::MulAdd(hn::Set(df, 0.05517165268F * kScale), f, hn::Set(df, 0.2426111209F * kScale));
    p = hn::MulAdd(p, f, hn::Set(df, 0.6932609885F * kScale));
    p = hn::MulAdd(p, f, hn::Set(df, 0.9999280737F * kScale));
  } else {
    constexpr float kScale = kLevels<2>;
    p = hn::MulAdd(hn::Set(df, 1.327647012e-3F * kScale), f, hn::Set(df, 9.675541319e-3F * kScale));
    p = hn::MulAdd(p, f, hn::Set(df, 0.05550713279F * kScale));
    p = hn::MulAdd(p, f, hn::Set(df, 0.2402211972F * kScale));
    p = hn::MulAdd(p, f, hn::Set(df, 0.6931469671F * kScale));
    p = hn::MulAdd(p, f, hn::Set(df, kScale));
  }
  const VI32 exponent = hn::ShiftLeft<23>(hn::BitCast(di32, shifted));
  const VF power = hn::BitCast(df, hn::Add(hn::BitCast(di32, p), exponent));
  return hn::NearestInt(power);
}

HWY_INLINE void mask_scores(std::uint64_t mask, float* HWY_RESTRICT scores) {
  for (int i = 0; i < 64; ++i) {
    if (((mask >> quad_token(i)) & 1U) == 0) scores[i] = -std::numeric_limits<float>::infinity();
  }
}

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

// Row sums of the scores' product -> scores in powers of two, in place; returns their maximum.
HWY_INLINE float finish_scores(const DecodeContext& context, const DecodeQuery& query,
                               const DecodeTile& tile, int row, float* HWY_RESTRICT scores) {
  const DF df;
  const bool plain = context.softcap == 0.0F && tile.full;
  // With a softcap the scores are natural until it is applied.
  const float unit = context.softcap == 0.0F ? kLog2E : 1.0F;
  const VF scale = hn::Set(df, query.scale[row] * unit);
  const VF offset = hn::Set(df, query.offset[row] * unit);
  VF top = hn::Set(df, -std::numeric_limits<float>::infinity());
  for (int i = 0; i < 64; i += kLanes) {
    const VF x = hn::MulAdd(hn::Load(df, scores + i), scale, offset);
    top = hn::Max(top, x);
    hn::Store(x, df, scores + i);
  }
  if (plain) return hn::GetLane(hn::MaxOfLanes(df, top));
  if (context.softcap != 0.0F) {
    softcap_scores(context.softcap, scores);
    for (int i = 0; i < 64; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(df, scores + i), hn::Set(df, kLog2E)), df, scores + i);
    }
  }
  if (!tile.full) mask_scores(tile.mask[row], scores);
  top = hn::Load(df, scores);
  for (int i = kLanes; i < 64; i += kLanes) top = hn::Max(top, hn::Load(df, scores + i));
  return hn::GetLane(hn::MaxOfLanes(df, top));
}

// Integer probabilities of one row in kQuad order; the low term (of two) follows 64 bytes later.
template <int kTerms>
HWY_INLINE void quantize_probabilities(const float* HWY_RESTRICT scores, float top,
                                       std::uint8_t* HWY_RESTRICT levels) {
  const DF df;
  [[maybe_unused]] const DI32 di32;
  // A row that sees nothing of the tile has only -inf: any finite maximum makes them 0.
  const VF maximum = hn::Set(df, top == -std::numeric_limits<float>::infinity() ? 0.0F : top);
  for (int i = 0; i < kTileTokens; i += 4 * kLanes) {
    VI32 level[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const VF score = hn::Load(df, scores + i + j * kLanes);
      level[j] = exp2_levels<kTerms>(hn::Sub(score, maximum));
    }
    if constexpr (kTerms == 1) {
      store_bytes(level[0], level[1], level[2], level[3], levels + i);
    } else {
      VI32 low[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        low[j] = hn::And(level[j], hn::Set(di32, kTermWeight - 1));
        level[j] = hn::ShiftRight<7>(level[j]);
      }
      store_bytes(level[0], level[1], level[2], level[3], levels + i);
      store_bytes(low[0], low[1], low[2], low[3], levels + kTileTokens + i);
    }
  }
}

// Sums of eight levels each, for all rows and terms.
HWY_INLINE void sum_levels(const std::uint8_t* HWY_RESTRICT levels, int bytes,
                           std::uint64_t* HWY_RESTRICT sums) {
  const DU8 du8;
  const hn::Repartition<std::uint64_t, DU8> du64;
  for (int i = 0; i < bytes; i += kVectorBytes) {
    hn::StoreU(hn::SumsOf8(hn::LoadU(du8, levels + i)), du64, sums + i / 8);
  }
}

// How the old output and the tile's share of the new one count.
template <int R>
struct RowWeights {
  float keep[R];
  float weight[R];
};

template <int R, int kTerms>
HWY_INLINE RowWeights<R> update_state(const DecodeContext& context, const float* HWY_RESTRICT top,
                                      const std::uint64_t* HWY_RESTRICT sums,
                                      const DecodeState& state) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const DF df;
  // Exponents of keep[0..] and of the tile's weight [kTargetWork..], in one vector or more.
  constexpr int kChanges = kLanes > 2 * kTargetWork ? kLanes : 2 * kTargetWork;
  alignas(64) float change[kChanges] = {};
  float new_max[R];
  for (int r = 0; r < R; ++r) {
    const float tile_max = top[r] * kLn2;
    const float old_max = state.max[r];
    new_max[r] = old_max > tile_max ? old_max : tile_max;
    if (new_max[r] == -kInfinity) continue;
    change[r] = old_max - new_max[r];
    change[kTargetWork + r] = tile_max - new_max[r];
  }
  for (int i = 0; i < kChanges; i += kLanes) {
    hn::Store(exp_non_positive(hn::Load(df, change + i)), df, change + i);
  }
  RowWeights<R> rows;
  for (int r = 0; r < R; ++r) {
    std::uint64_t total = 0;
    for (int i = 0; i < 8; ++i) total += sums[8 * r * kTerms + i];
    if constexpr (kTerms == 2) {
      total *= kTermWeight;
      for (int i = 0; i < 8; ++i) total += sums[8 * (r * kTerms + 1) + i];
    }
    const float tile_weight = change[kTargetWork + r] / kLevels<kTerms>;
    rows.keep[r] = change[r];
    rows.weight[r] = tile_weight * context.value_unit;
    state.sum[r] =
        state.sum[r] * change[r] + tile_weight * static_cast<float>(static_cast<int>(total));
    state.max[r] = new_max[r];
  }
  return rows;
}

// Values of a tile that one row sees in part. Scales of value blocks that it does not see may be
// anything (they are past the sequence's end, or stale): as 0 they leave the others' precision
// alone.
template <int kTerms, bool kMx>
HWY_INLINE void masked_values(const DecodeContext& context, const DecodeTile& tile,
                              std::uint64_t mask, const std::uint8_t* HWY_RESTRICT levels,
                              const std::uint64_t* HWY_RESTRICT level_sums, float keep,
                              float weight, float* HWY_RESTRICT out) {
  constexpr int kScaleBlocks = kMx ? 2 : 4;
  constexpr int kBlockTokens = kTileTokens / kScaleBlocks;
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  alignas(64) std::uint8_t scales[4 * kMaxHeadDim];
  std::memcpy(scales, tile.tile + parts.value_scales,
              static_cast<std::size_t>(parts.bytes - parts.value_scales));
  for (int b = 0; b < kScaleBlocks; ++b) {
    const std::uint64_t tokens = ((std::uint64_t{1} << kBlockTokens) - 1) << (b * kBlockTokens);
    if ((mask & tokens) != 0) continue;
    for (int group = 0; group < layout::value_dim_groups(context.head_dim); ++group) {
      std::memset(scales + 16 * (group * kScaleBlocks + b), 0, 16);
    }
  }
  tile_values<1, kTerms, kMx>(context, tile, scales, levels, level_sums, &keep, &weight, out);
}

template <int R, int kTerms, bool kMx>
void decode_tile(const DecodeContext& context, const DecodeQuery& query, const DecodeTile& tile,
                 const DecodeState& state) {
  constexpr int kWork = R * kTerms;
  alignas(64) float scores[R * kTileTokens];
  tile_scores<R, kTerms, kMx>(context, query, tile, scores);
  alignas(64) std::uint8_t levels[kTileTokens * kWork];
  alignas(64) std::uint64_t level_sums[8 * kWork];
  float top[R];
  for (int r = 0; r < R; ++r) {
    top[r] = finish_scores(context, query, tile, r, scores + kTileTokens * r);
  }
  for (int r = 0; r < R; ++r) {  // apart from the maxima, whose latencies overlap
    quantize_probabilities<kTerms>(scores + kTileTokens * r, top[r],
                                   levels + kTileTokens * r * kTerms);
  }
  sum_levels(levels, kTileTokens * kWork, level_sums);
  const RowWeights<R> rows = update_state<R, kTerms>(context, top, level_sums, state);
  if (tile.full) {
    const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
    tile_values<R, kTerms, kMx>(context, tile, tile.tile + parts.value_scales, levels, level_sums,
                                rows.keep, rows.weight, state.out);
    return;
  }
  for (int r = 0; r < R; ++r) {
    if (tile.mask[r] == 0) continue;
    masked_values<kTerms, kMx>(context, tile, tile.mask[r], levels + kTileTokens * r * kTerms,
                               level_sums + 8 * r * kTerms, rows.keep[r], rows.weight[r],
                               state.out + std::int64_t{r} * context.head_dim);
  }
}

struct TileTable {
  decltype(DecodeKernels::tile) tile[kTargetWork];
};
template <int kCount>
using Rows = std::make_integer_sequence<int, kCount>;
template <int kTerms, bool kMx, int... kRow>
constexpr TileTable tile_table(std::integer_sequence<int, kRow...>) {
  return {{decode_tile<kRow + 1, kTerms, kMx>...}};
}

inline void decode_tile_any(const DecodeContext& context, const DecodeQuery& query,
                            const DecodeTile& tile, const DecodeState& state) {
  static constexpr TileTable kInt8[2] = {tile_table<1, false>(Rows<kTargetWork>()),
                                         tile_table<1, true>(Rows<kTargetWork>())};
  static constexpr TileTable kWide[2] = {tile_table<2, false>(Rows<kTargetWork / 2>()),
                                         tile_table<2, true>(Rows<kTargetWork / 2>())};
  const int mx = context.format == Format::kMxfp4 ? 1 : 0;
  (query.terms == 1 ? kInt8 : kWide)[mx].tile[query.rows - 1](context, query, tile, state);
}

// Every tile is asked, so the answer "none" is quick: NaN is the largest code of its format, and
// the maximum of all codes tells.
inline int count_nan_scales(const DecodeContext& context, const std::uint8_t* tile) {
  const DU8 du8;
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  // An E4M3 NaN may have either sign.
  const bool mx = context.format == Format::kMxfp4;
  const VU8 nan = hn::Set(du8, mx ? kE8m0Nan : kE4m3Nan);
  const VU8 bits = hn::Set(du8, mx ? 0xFF : 0x7F);
  const std::int64_t begins[2] = {parts.key_scales, parts.value_scales};
  const std::int64_t ends[2] = {parts.value_codes, parts.bytes};
  VU8 top = hn::Zero(du8);
  for (int part = 0; part < 2; ++part) {
    for (std::int64_t i = begins[part]; i < ends[part]; i += kVectorBytes) {
      top = hn::Max(top, hn::And(hn::LoadU(du8, tile + i), bits));
    }
  }
  if (HWY_LIKELY(hn::AllFalse(du8, hn::Eq(top, nan)))) return 0;
  int count = 0;
  for (int part = 0; part < 2; ++part) {
    for (std::int64_t i = begins[part]; i < ends[part]; ++i) {
      const int code = tile[i] & (mx ? 0xFF : 0x7F);
      count += code == (mx ? kE8m0Nan : kE4m3Nan) ? 1 : 0;
    }
  }
  return count;
}

inline const DecodeKernels* get_decode_kernels() {
  static constexpr DecodeKernels kKernels = {kTargetWork, decode_tile_any, count_nan_scales,
                                             wide_query_bytes, widen_query};
  return &kKernels;
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
