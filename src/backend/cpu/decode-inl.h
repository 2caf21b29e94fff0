// Decode attention over one tile of kQuad pages, per-target.
//
// Scores: codes become unsigned bytes 2k + 12 (0..24), the query signed bytes; PMADDUBSW gives
// pairs, four of which (16 dims over two int16 lanes of a row) are added in int16. The bias -12 *
// sum(q) starts the accumulator, so it ends at the sum of 2k * q: at most 12 * 127 * 16 = 24384 in
// magnitude. On the way it stays inside int16 as well: 24 * 127 * 8 = 24384 a lane, less the bias.
// Values: probabilities are the unsigned bytes (0..127), codes the signed ones:
// 127 * 12 * 16 = 24384 again.
// Every block's integer sum is exact; it becomes float once, is multiplied by the block scale and
// added. With two terms the high one counts 128 times.
#if defined(BITDECODING_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_INL_H_
#undef BITDECODING_CPU_DECODE_INL_H_
#else
#define BITDECODING_CPU_DECODE_INL_H_
#endif

#include <hwy/cache_control.h>

#include <cstring>
#include <limits>

#include "backend/cpu/decode_kernels.h"
#include "backend/cpu/ops-inl.h"
#include "page/layout.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

inline constexpr int kTermWeight = 128;

// 16 columns of one row vector as bytes, four columns a quad.
struct Block {
  VU8 quad[4];
};

HWY_INLINE Block unpack_block(const std::uint8_t* HWY_RESTRICT codes, VU8 table) {
  const DU8 du8;
  const DU16 du16;
  const VU8 low_mask = hn::Set(du8, 0x0F);
  Block block;
#pragma GCC unroll 2
  for (int chunk = 0; chunk < 2; ++chunk) {
    const VU8 raw = hn::LoadU(du8, codes + 64 * chunk);
    const VU8 up = hn::BitCast(du8, hn::ShiftRight<4>(hn::BitCast(du16, raw)));
    block.quad[2 * chunk] = hn::TableLookupBytes(table, hn::And(raw, low_mask));
    block.quad[2 * chunk + 1] = hn::TableLookupBytes(table, hn::And(up, low_mask));
  }
  return block;
}

// Sum over 16 columns times four quads of one query row; keys: codes are unsigned and `bias` is
// added; values: the query's bytes are unsigned.
template <bool kKeys>
HWY_INLINE VF multiply_row(const Block& block, const std::int32_t* HWY_RESTRICT quads, int stride,
                           std::int32_t bias) {
  const DU8 du8;
  const DI8 di8;
  const DI16 di16;
  const DI32 di32;
  VI16 acc = hn::BitCast(di16, hn::Set(di32, bias));
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const auto x = hn::Set(di32, quads[q * stride]);
    if constexpr (kKeys) {
      acc = hn::Add(acc, mul_pairs(block.quad[q], hn::BitCast(di8, x)));
    } else {
      const VI16 product = mul_pairs(hn::BitCast(du8, x), hn::BitCast(di8, block.quad[q]));
      acc = q == 0 ? product : hn::Add(acc, product);
    }
  }
  return pair_sum(acc);
}

// One row of one block, all terms.
template <bool kKeys, int kTerms>
HWY_INLINE VF multiply_terms(const Block& block, const std::int32_t* HWY_RESTRICT quads, int stride,
                             const std::int32_t* HWY_RESTRICT bias) {
  const VF high = multiply_row<kKeys>(block, quads, stride, kKeys ? bias[0] : 0);
  if constexpr (kTerms == 1) return high;
  const VF low = multiply_row<kKeys>(block, quads + 1, stride, kKeys ? bias[1] : 0);
  return hn::MulAdd(high, hn::Set(DF(), static_cast<float>(kTermWeight)), low);
}

template <bool kMx>
HWY_INLINE VF load_scales(const std::uint8_t* HWY_RESTRICT p) {
  if constexpr (kMx) {
    return load_e8m0(p);
  } else {
    return load_e4m3(p);
  }
}

// Scores of 64 tokens, in kQuad order (row group, rank), for R rows: scores[r * 64 + ...].
template <int R, int kTerms, bool kMx>
HWY_INLINE void tile_scores(const DecodeContext& context, const DecodeQuery& query,
                            const std::uint8_t* HWY_RESTRICT tile, float* HWY_RESTRICT scores) {
  constexpr int W = R * kTerms;
  constexpr int kScaleBytes = layout::fragment_scale_bytes(kMx ? Format::kMxfp4 : Format::kNvfp4);
  const DF df;
  const VU8 table = e2m1_table(12);
  const int column_blocks = layout::key_column_blocks(context.head_dim);
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  const std::uint8_t* HWY_RESTRICT codes = tile + parts.key_codes;
  const std::uint8_t* HWY_RESTRICT scales = tile + parts.key_scales;
  const int blocks = (context.head_dim + 15) / 16;
  // One row vector at a time: four quads, R sums, the scale and three constants stay in registers,
  // and no sum goes through memory. The broadcasts of the query are loads, which have room.
  for (int group = 0; group < 4; ++group) {
#pragma GCC unroll 1
    for (int v = 0; v < kRowVectors; ++v) {
      VF sum[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r] = hn::Zero(df);
      for (int index = 0; index < blocks; ++index) {
        const std::int64_t fragment = group * column_blocks + index / 4;
        const int inner = index % 4;
        const Block block = unpack_block(
            codes + fragment * layout::kFragmentBytes + 128 * inner + kVectorBytes * v, table);
        const VF s = load_scales<kMx>(scales + fragment * kScaleBytes +
                                      16 * (kMx ? inner / 2 : inner) + kLanes * v);
        const std::int32_t* HWY_RESTRICT quads = query.quads + index * 4 * W;
        const std::int32_t* HWY_RESTRICT bias = query.bias + index * W;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sum[r] = hn::MulAdd(
              multiply_terms<true, kTerms>(block, quads + r * kTerms, W, bias + r * kTerms), s,
              sum[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        hn::StoreU(hn::MulAdd(sum[r], hn::Set(df, query.scale[r]), hn::Set(df, query.offset[r])),
                   df, scores + 64 * r + 16 * group + kLanes * v);
      }
    }
  }
}

// Tile token of position i in kQuad order: row group i / 16, rank i % 16.
constexpr int quad_token(int i) {
  const int group = i / 16;
  const int rank = i % 16;
  return 32 * (group / 2) + 8 * (rank / 4) + 4 * (group % 2) + rank % 4;
}

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

// Probabilities of one row as quads of bytes, token order, relative to the tile's own maximum.
// Returns the integer sum of the probabilities; `quads` has 16 * stride entries.
template <int kTerms>
HWY_INLINE std::int32_t quantize_probabilities(const float* HWY_RESTRICT scores, float tile_max,
                                               std::int32_t* HWY_RESTRICT quads, int stride) {
  constexpr float kLevels = kTerms == 1 ? 127.0F : 127.0F * kTermWeight + 127.0F;
  const DF df;
  const DI32 di32;
  const hn::Rebind<std::uint8_t, DI32> du8;
  // Bytes in kQuad order; sixteen 4-byte units of them then move to token order.
  alignas(64) std::uint8_t high[64];
  alignas(64) std::uint8_t low[64];
  VI32 total = hn::Zero(di32);
  for (int i = 0; i < 64; i += kLanes) {
    const VF p = exp_non_positive(hn::Sub(hn::LoadU(df, scores + i), hn::Set(df, tile_max)));
    const VI32 level = hn::NearestInt(hn::Mul(p, hn::Set(df, kLevels)));
    total = hn::Add(total, level);
    if constexpr (kTerms == 1) {
      hn::StoreU(hn::DemoteTo(du8, level), du8, high + i);
    } else {
      hn::StoreU(hn::DemoteTo(du8, hn::ShiftRight<7>(level)), du8, high + i);
      hn::StoreU(hn::DemoteTo(du8, hn::And(level, hn::Set(di32, kTermWeight - 1))), du8, low + i);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < 16; ++q) {
    const int quad = quad_token(4 * q) / 4;
    std::memcpy(quads + quad * stride, high + 4 * q, 4);
    if constexpr (kTerms == 2) std::memcpy(quads + quad * stride + 1, low + 4 * q, 4);
  }
  return hn::GetLane(hn::SumOfLanes(di32, total));
}

// out[r] = out[r] * keep[r] + weight[r] * (P . V) for R rows.
template <int R, int kTerms, bool kMx>
HWY_INLINE void tile_values(const DecodeContext& context, const std::uint8_t* HWY_RESTRICT tile,
                            const std::int32_t* HWY_RESTRICT quads, const float* keep,
                            const float* weight, float* HWY_RESTRICT out) {
  constexpr int W = R * kTerms;
  constexpr int kScaleBytes = layout::fragment_scale_bytes(kMx ? Format::kMxfp4 : Format::kNvfp4);
  const DF df;
  const VU8 table = e2m1_table(0);
  const layout::TileParts parts = layout::tile_parts(context.format, context.head_dim);
  const std::uint8_t* HWY_RESTRICT codes = tile + parts.value_codes;
  const std::uint8_t* HWY_RESTRICT scales = tile + parts.value_scales;
  for (int dim = 0; dim < context.head_dim; dim += 16) {
#pragma GCC unroll 1
    for (int v = 0; v < kRowVectors; ++v) {
      VF sum[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r] = hn::Zero(df);
#pragma GCC unroll 1
      for (int index = 0; index < 4; ++index) {
        const Block block = unpack_block(codes + std::int64_t{dim / 16} * layout::kFragmentBytes +
                                             128 * index + kVectorBytes * v,
                                         table);
        const VF s = load_scales<kMx>(scales + std::int64_t{dim / 16} * kScaleBytes +
                                      16 * (kMx ? index / 2 : index) + kLanes * v);
        const std::int32_t* HWY_RESTRICT p = quads + index * 4 * W;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sum[r] = hn::MulAdd(multiply_terms<false, kTerms>(block, p + r * kTerms, W, nullptr), s,
                              sum[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        float* HWY_RESTRICT o =
            out + static_cast<std::int64_t>(r) * context.head_dim + dim + kLanes * v;
        const VF old = hn::Mul(hn::LoadU(df, o), hn::Set(df, keep[r]));
        hn::StoreU(hn::MulAdd(sum[r], hn::Set(df, weight[r]), old), df, o);
      }
    }
  }
}

template <int R, int kTerms, bool kMx>
void decode_tile(const DecodeContext& context, const DecodeQuery& query, const DecodeTile& tile,
                 const DecodeState& state) {
  constexpr float kLevels = kTerms == 1 ? 127.0F : 127.0F * kTermWeight + 127.0F;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const DF df;
  if (tile.prefetch != nullptr) {
    const std::int64_t bytes = layout::tile_parts(context.format, context.head_dim).bytes;
    for (std::int64_t i = 0; i < bytes; i += 64) hwy::Prefetch(tile.prefetch + i);
  }
  alignas(64) float scores[R * 64];
  alignas(64) std::int32_t quads[16 * R * kTerms] = {};
  tile_scores<R, kTerms, kMx>(context, query, tile.tile, scores);
  float keep[R];
  float weight[R];
  for (int r = 0; r < R; ++r) {
    float* row = scores + 64 * r;
    if (context.softcap != 0.0F) softcap_scores(context.softcap, row);
    if (!tile.full) mask_scores(tile.mask[r], row);
    VF top = hn::LoadU(df, row);
    for (int i = kLanes; i < 64; i += kLanes) top = hn::Max(top, hn::LoadU(df, row + i));
    const float tile_max = hn::GetLane(hn::MaxOfLanes(df, top));
    if (tile_max == -kInfinity) {  // nothing visible: quads stay 0
      keep[r] = 1.0F;
      weight[r] = 0.0F;
      continue;
    }
    const std::int32_t total =
        quantize_probabilities<kTerms>(row, tile_max, quads + r * kTerms, R * kTerms);
    const float old_max = state.max[r];
    const float new_max = old_max > tile_max ? old_max : tile_max;
    // Two exponentials a tile and row; scalar calls would cost a libm dependency on rounding.
    alignas(64) float change[kLanes] = {};
    change[0] = old_max - new_max;
    change[1] = tile_max - new_max;
    hn::StoreU(exp_non_positive(hn::LoadU(df, change)), df, change);
    const float tile_weight = change[1] / kLevels;
    keep[r] = old_max == -kInfinity ? 0.0F : change[0];
    weight[r] = tile_weight * context.value_unit;
    state.sum[r] = state.sum[r] * keep[r] + tile_weight * static_cast<float>(total);
    state.max[r] = new_max;
  }
  tile_values<R, kTerms, kMx>(context, tile.tile, quads, keep, weight, state.out);
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
  static constexpr DecodeKernels kKernels = {decode_tile_any, count_nan_scales};
  return &kKernels;
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
