// Decode attention over one tile of kQuad pages, per-target: scores, softmax over the tile, values.
//
// The products are integer and exact per block of 16 columns; a block's sum becomes float once, is
// multiplied by the block scale and added. With two terms the high one counts 128 times.
// Probabilities are integers 0..127 (0..16383) relative to the tile's own maximum.
#if defined(BITDECODING_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_INL_H_
#undef BITDECODING_CPU_DECODE_INL_H_
#else
#define BITDECODING_CPU_DECODE_INL_H_
#endif

#include <cstring>
#include <limits>

#include "backend/cpu/decode_common-inl.h"
#include "backend/cpu/decode_kernels.h"
#include "backend/cpu/decode_pairs-inl.h"
#include "backend/cpu/decode_quads-inl.h"
#include "page/layout.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

HWY_INLINE void mask_scores(std::uint64_t mask, float* HWY_RESTRICT scores) {
  for (int i = 0; i < 64; ++i) {
    if (((mask >> quad_token(i)) & 1U) == 0) scores[i] = -std::numeric_limits<float>::infinity();
  }
}

HWY_INLINE void softcap_scores(float cap, float* HWY_RESTRICT scores) {
  // tanh(x) = 1 - 2 / (e^2x + 1), with the exponent made non-positive by symmetry.
  const DF df;
  const VF one = hn::Set(df, 1.0F);
  for (int i = 0; i < 64; i += kLanes) {
    const VF x = hn::Mul(hn::LoadU(df, scores + i), hn::Set(df, 1.0F / cap));
    const VF e = exp_non_positive(hn::Mul(hn::Abs(x), hn::Set(df, -2.0F)));
    const VF t = hn::Div(hn::Sub(one, e), hn::Add(one, e));
    hn::StoreU(hn::Mul(hn::CopySign(t, x), hn::Set(df, cap)), df, scores + i);
  }
}

inline constexpr bool kUsePairs = kVectorBytes <= 32;
inline constexpr float kSumUnit = kUsePairs ? kPairUnit : 1.0F;
inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;
inline constexpr int kMaxHeadDim = 256;

template <int kTerms>
inline constexpr float kLevels = kTerms == 1 ? 127.0F : 127.0F * kTermWeight + 127.0F;

// Row sums of the scores' product -> scores in powers of two, in place; returns their maximum.
HWY_INLINE float finish_scores(const DecodeContext& context, const DecodeQuery& query,
                               const DecodeTile& tile, int row, float* HWY_RESTRICT scores) {
  const DF df;
  const bool plain = context.softcap == 0.0F && tile.full;
  // With a softcap the scores are natural until it is applied.
  const float unit = context.softcap == 0.0F ? kLog2E : 1.0F;
  const VF scale = hn::Set(df, query.scale[row] * kSumUnit * unit);
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
  const DI32 di32;
  const hn::Rebind<std::uint8_t, DI32> du8;
  // A row that sees nothing of the tile has only -inf: any finite maximum makes them 0.
  const VF maximum = hn::Set(df, top == -std::numeric_limits<float>::infinity() ? 0.0F : top);
#pragma GCC unroll 2
  for (int i = 0; i < 64; i += kLanes) {
    const VI32 level = exp2_levels<kTerms>(hn::Sub(hn::Load(df, scores + i), maximum),
                                           hn::Set(df, kLevels<kTerms>));
    if constexpr (kTerms == 1) {
      hn::StoreU(hn::DemoteTo(du8, level), du8, levels + i);
    } else {
      hn::StoreU(hn::DemoteTo(du8, hn::ShiftRight<7>(level)), du8, levels + i);
      hn::StoreU(hn::DemoteTo(du8, hn::And(level, hn::Set(di32, kTermWeight - 1))), du8,
                 levels + 64 + i);
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
  // Exponents of keep[0..3] and of the tile's weight [4..7], in one or two vectors.
  alignas(64) float change[kLanes > 8 ? kLanes : 8] = {};
  float new_max[R];
  for (int r = 0; r < R; ++r) {
    const float tile_max = top[r] * kLn2;
    const float old_max = state.max[r];
    new_max[r] = old_max > tile_max ? old_max : tile_max;
    if (new_max[r] == -kInfinity) continue;
    change[r] = old_max - new_max[r];
    change[4 + r] = tile_max - new_max[r];
  }
  for (int i = 0; i < 8; i += kLanes) {
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
    const float tile_weight = change[4 + r] / kLevels<kTerms>;
    rows.keep[r] = change[r];
    rows.weight[r] = tile_weight * context.value_unit * kSumUnit;
    state.sum[r] =
        state.sum[r] * change[r] + tile_weight * static_cast<float>(static_cast<int>(total));
    state.max[r] = new_max[r];
  }
  return rows;
}

template <int R, int kTerms, bool kMx>
HWY_INLINE void pair_scores(const DecodeContext& context, const DecodeQuery& query,
                            const DecodeTile& tile, float* HWY_RESTRICT sums) {
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  const int stride = 4 * layout::key_column_blocks(context.head_dim);
  alignas(64) float scales[4 * kMaxHeadDim];
  convert_scales<kMx>(tile.tile + parts.key_scales, parts.value_codes - parts.key_scales, scales);
  alignas(64) std::uint8_t own[kMaxHeadDim / 16 * R * kTerms * kWideBytes];
  const std::uint8_t* wide = query.wide;
  if (wide == nullptr) {
    widen_query(context.head_dim, query, own);
    wide = own;
  }
  std::memset(sums, 0, sizeof(float) * 64 * R);
  multiply_fragments<R, kTerms, kMx>(
      {tile.tile + parts.key_codes, scales, wide,
       tile.prefetch == nullptr ? nullptr : tile.prefetch + parts.key_codes, 4,
       (context.head_dim + 15) / 16, stride, sums, 64});
}

// out[r] = out[r] * keep[r] + weight[r] * (P . V) for R rows.
template <int R, int kTerms, bool kMx>
HWY_INLINE void pair_values(const DecodeContext& context, const DecodeTile& tile,
                            const std::uint8_t* HWY_RESTRICT levels,
                            const std::uint64_t* HWY_RESTRICT level_sums, const RowWeights<R>& rows,
                            float* HWY_RESTRICT out) {
  constexpr int W = R * kTerms;
  const DF df;
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  alignas(64) float scales[4 * kMaxHeadDim];
  convert_scales<kMx>(tile.tile + parts.value_scales, parts.bytes - parts.value_scales, scales);
  alignas(64) std::uint8_t wide[4 * W * kWideBytes];
  for (int w = 0; w < W; ++w) {
    widen_levels(levels + 64 * w, level_sums + 8 * w, wide + w * kWideBytes,
                 std::int64_t{W} * kWideBytes);
  }
  alignas(64) float sums[R * kMaxHeadDim];
  const int head_dim = context.head_dim;
  std::memset(sums, 0, sizeof(float) * static_cast<std::size_t>(head_dim) * R);
  multiply_fragments<R, kTerms, kMx>(
      {tile.tile + parts.value_codes, scales, wide,
       tile.prefetch == nullptr ? nullptr : tile.prefetch + parts.value_codes, head_dim / 16, 4, 4,
       sums, head_dim});
  for (int r = 0; r < R; ++r) {
    const VF keep = hn::Set(df, rows.keep[r]);
    const VF weight = hn::Set(df, rows.weight[r]);
    float* HWY_RESTRICT o = out + std::int64_t{r} * head_dim;
    const float* HWY_RESTRICT sum = sums + std::int64_t{r} * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      const VF old = hn::Mul(hn::LoadU(df, o + d), keep);
      hn::StoreU(hn::MulAdd(hn::Load(df, sum + d), weight, old), df, o + d);
    }
  }
}

template <int R, int kTerms, bool kMx>
void decode_tile(const DecodeContext& context, const DecodeQuery& query, const DecodeTile& tile,
                 const DecodeState& state) {
  constexpr int W = R * kTerms;
  alignas(64) float scores[R * 64];
  if constexpr (kUsePairs) {
    pair_scores<R, kTerms, kMx>(context, query, tile, scores);
  } else {
    if (tile.prefetch != nullptr) prefetch_tile(context, tile.prefetch);
    quad_scores<R, kTerms, kMx>(context, query, tile.tile, scores);
  }
  alignas(64) std::uint8_t levels[64 * W];
  alignas(64) std::uint64_t level_sums[8 * W];
  float top[R];
  for (int r = 0; r < R; ++r) {
    top[r] = finish_scores(context, query, tile, r, scores + 64 * r);
    quantize_probabilities<kTerms>(scores + 64 * r, top[r], levels + 64 * r * kTerms);
  }
  sum_levels(levels, 64 * W, level_sums);
  const RowWeights<R> rows = update_state<R, kTerms>(context, top, level_sums, state);
  if constexpr (kUsePairs) {
    pair_values<R, kTerms, kMx>(context, tile, levels, level_sums, rows, state.out);
  } else {
    alignas(64) std::int32_t quads[16 * W];
    for (int q = 0; q < 16; ++q) {
      const int quad = quad_token(4 * q) / 4;
      for (int w = 0; w < W; ++w) std::memcpy(quads + quad * W + w, levels + 64 * w + 4 * q, 4);
    }
    quad_values<R, kTerms, kMx>(context, tile.tile, quads, rows.keep, rows.weight, state.out);
  }
}

// Bytes of the query's broadcast form, and that form; 0 where the kernel does not use one.
inline std::int64_t wide_query_bytes(int head_dim, int work) {
  return kUsePairs ? std::int64_t{4} * layout::key_column_blocks(head_dim) * work * kWideBytes : 0;
}
inline void widen_query_any(int head_dim, const DecodeQuery& query, std::uint8_t* out) {
  if constexpr (kUsePairs) widen_query(head_dim, query, out);
}

inline void decode_tile_any(const DecodeContext& context, const DecodeQuery& query,
                            const DecodeTile& tile, const DecodeState& state) {
  using Tile =
      void (*)(const DecodeContext&, const DecodeQuery&, const DecodeTile&, const DecodeState&);
  static constexpr Tile kInt8[2][4] = {{decode_tile<1, 1, false>, decode_tile<2, 1, false>,
                                        decode_tile<3, 1, false>, decode_tile<4, 1, false>},
                                       {decode_tile<1, 1, true>, decode_tile<2, 1, true>,
                                        decode_tile<3, 1, true>, decode_tile<4, 1, true>}};
  static constexpr Tile kWide[2][2] = {{decode_tile<1, 2, false>, decode_tile<2, 2, false>},
                                       {decode_tile<1, 2, true>, decode_tile<2, 2, true>}};
  const int mx = context.format == Format::kMxfp4 ? 1 : 0;
  (query.terms == 1 ? kInt8[mx][query.rows - 1] : kWide[mx][query.rows - 1])(context, query, tile,
                                                                             state);
}

inline int count_nan_scales(const DecodeContext& context, const std::uint8_t* tile) {
  const DU8 du8;
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  const VU8 nan = hn::Set(du8, context.format == Format::kMxfp4 ? 0xFF : 0x7F);
  int count = 0;
  const std::int64_t begins[2] = {parts.key_scales, parts.value_scales};
  const std::int64_t ends[2] = {parts.value_codes, parts.bytes};
  for (int part = 0; part < 2; ++part) {
    for (std::int64_t i = begins[part]; i < ends[part]; i += kVectorBytes) {
      count += static_cast<int>(hn::CountTrue(du8, hn::Eq(hn::LoadU(du8, tile + i), nan)));
    }
  }
  return count;
}

inline const DecodeKernels* get_decode_kernels() {
  static constexpr DecodeKernels kKernels = {decode_tile_any, count_nan_scales, wide_query_bytes,
                                             widen_query_any};
  return &kKernels;
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
