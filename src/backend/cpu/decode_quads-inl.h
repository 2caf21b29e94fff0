// Decode attention's two products where a vector holds 16 rows of four bytes (AVX-512).
//
// PMADDUBSW gives pairs, four of which (16 columns over two int16 lanes of a row) are added in
// int16. Keys: the codes are unsigned (2k + 12), the query signed; the bias -12 * sum(q) starts one
// lane. On the way a lane stays inside int16: 24 * 127 * 8 = 24384, less the bias. Values: the
// probabilities are unsigned, the codes signed.
#if defined(BITDECODING_CPU_DECODE_QUADS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_QUADS_INL_H_
#undef BITDECODING_CPU_DECODE_QUADS_INL_H_
#else
#define BITDECODING_CPU_DECODE_QUADS_INL_H_
#endif

#include <hwy/cache_control.h>

#include "backend/cpu/decode_common-inl.h"
#include "backend/cpu/decode_kernels.h"
#include "page/layout.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

HWY_INLINE void prefetch_tile(const DecodeContext& context, const std::uint8_t* HWY_RESTRICT tile) {
  const std::int64_t bytes = layout::tile_parts(context.format, context.head_dim).bytes;
  for (std::int64_t i = 0; i < bytes; i += 64) hwy::Prefetch(tile + i);
}

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

// Scores of 64 tokens, in kQuad order (row group, rank), for R rows, without the query's scale:
// sums[r * 64 + ...].
template <int R, int kTerms, bool kMx>
HWY_INLINE void quad_scores(const DecodeContext& context, const DecodeQuery& query,
                            const std::uint8_t* HWY_RESTRICT tile, float* HWY_RESTRICT sums) {
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
        hn::StoreU(sum[r], df, sums + 64 * r + 16 * group + kLanes * v);
      }
    }
  }
}

// out[r] = out[r] * keep[r] + weight[r] * (P . V) for R rows.
template <int R, int kTerms, bool kMx>
HWY_INLINE void quad_values(const DecodeContext& context, const std::uint8_t* HWY_RESTRICT tile,
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

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
