// SPDX-License-Identifier: Apache-2.0
// The few operations that Highway 1.0.3 lacks, and what every kernel shares. Per-target: included
// again for each instruction set by foreach_target.h.
#if defined(BITDECODING_CPU_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_OPS_INL_H_
#undef BITDECODING_CPU_OPS_INL_H_
#else
#define BITDECODING_CPU_OPS_INL_H_
#endif

#include <hwy/highway.h>

#include "numeric/e2m1.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DU8 = hn::ScalableTag<std::uint8_t>;
using DI8 = hn::ScalableTag<std::int8_t>;
using DI16 = hn::ScalableTag<std::int16_t>;
using DU16 = hn::ScalableTag<std::uint16_t>;
using DI32 = hn::ScalableTag<std::int32_t>;
using DU32 = hn::ScalableTag<std::uint32_t>;
using DF = hn::ScalableTag<float>;
using VU8 = hn::Vec<DU8>;
using VI8 = hn::Vec<DI8>;
using VI16 = hn::Vec<DI16>;
using VI32 = hn::Vec<DI32>;
using VF = hn::Vec<DF>;

// Floats, or rows of four bytes, in a vector.
inline constexpr int kLanes = static_cast<int>(HWY_LANES(float));
inline constexpr int kVectorBytes = 4 * kLanes;
// Vectors that hold 16 rows of four bytes.
inline constexpr int kRowVectors = 16 / kLanes;

// a[2i] * b[2i] + a[2i+1] * b[2i+1], unsigned times signed, saturated to int16 (PMADDUBSW).
HWY_INLINE VI16 mul_pairs(VU8 a, VI8 b) {
#if HWY_TARGET == HWY_SSSE3
  return VI16{_mm_maddubs_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX2
  return VI16{_mm256_maddubs_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX3
  return VI16{_mm512_maddubs_epi16(a.raw, b.raw)};
#else
  // Even and odd bytes as int16; no caller comes near int16's limits (see decode-inl.h).
  const DU16 du16;
  const DI16 di16;
  const auto a16 = hn::BitCast(du16, a);
  const auto b16 = hn::BitCast(di16, b);
  const VI16 a_even = hn::BitCast(di16, hn::And(a16, hn::Set(du16, 0xFF)));
  const VI16 a_odd = hn::BitCast(di16, hn::ShiftRight<8>(a16));
  const VI16 b_even = hn::ShiftRight<8>(hn::ShiftLeft<8>(b16));
  const VI16 b_odd = hn::ShiftRight<8>(b16);
  return hn::Add(hn::Mul(a_even, b_even), hn::Mul(a_odd, b_odd));
#endif
}

// a[2i] * b[2i] + a[2i+1] * b[2i+1] as int32 (PMADDWD).
HWY_INLINE VI32 mul_add_pairs(VI16 a, VI16 b) {
#if HWY_TARGET == HWY_SSSE3
  return VI32{_mm_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX2
  return VI32{_mm256_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX3
  return VI32{_mm512_madd_epi16(a.raw, b.raw)};
#else
  const DI32 di32;
  const VI32 a32 = hn::BitCast(di32, a);
  const VI32 b32 = hn::BitCast(di32, b);
  const VI32 odd = hn::Mul(hn::ShiftRight<16>(a32), hn::ShiftRight<16>(b32));
  const VI32 even = hn::Mul(hn::ShiftRight<16>(hn::ShiftLeft<16>(a32)),
                            hn::ShiftRight<16>(hn::ShiftLeft<16>(b32)));
  return hn::Add(odd, even);
#endif
}

// Four vectors of integers 0..255 -> bytes at `out`, in order.
HWY_INLINE void store_bytes(VI32 a, VI32 b, VI32 c, VI32 d, std::uint8_t* HWY_RESTRICT out) {
#if HWY_TARGET == HWY_SSSE3
  const __m128i bytes =
      _mm_packus_epi16(_mm_packs_epi32(a.raw, b.raw), _mm_packs_epi32(c.raw, d.raw));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
#elif HWY_TARGET == HWY_AVX2
  const __m256i bytes =
      _mm256_packus_epi16(_mm256_packs_epi32(a.raw, b.raw), _mm256_packs_epi32(c.raw, d.raw));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32(bytes, order));
#else
  const hn::Rebind<std::uint8_t, DI32> du8;
  hn::StoreU(hn::DemoteTo(du8, a), du8, out);
  hn::StoreU(hn::DemoteTo(du8, b), du8, out + kLanes);
  hn::StoreU(hn::DemoteTo(du8, c), du8, out + 2 * kLanes);
  hn::StoreU(hn::DemoteTo(du8, d), du8, out + 3 * kLanes);
#endif
}

// E4M3 bytes (non-negative) as float times 2^-8: shifted left by 7 they are IEEE halves with the
// exponent bias 15 instead of 7, subnormals included, and the half-to-float conversion handles
// those whatever the thread's flush-to-zero mode is. 0x7F gives 480: finite, and counted elsewhere.
inline constexpr float kE4m3Unit = 256.0F;
HWY_INLINE VF load_e4m3(const std::uint8_t* HWY_RESTRICT p) {
  const DF df;
  const hn::Rebind<std::uint8_t, DF> du8;
  const hn::Rebind<std::uint16_t, DF> du16;
  const hn::Rebind<hwy::float16_t, DF> df16;
  return hn::PromoteTo(df,
                       hn::BitCast(df16, hn::ShiftLeft<7>(hn::PromoteTo(du16, hn::LoadU(du8, p)))));
}

// E8M0 bytes as float: the byte is float's exponent field; 0 is 2^-127, a subnormal pattern.
HWY_INLINE VF load_e8m0(const std::uint8_t* HWY_RESTRICT p) {
  const DF df;
  const DU32 du32;
  const hn::Rebind<std::uint8_t, DF> du8;
  const auto bits = hn::ShiftLeft<23>(hn::PromoteTo(du32, hn::LoadU(du8, p)));
  return hn::BitCast(df, hn::Max(bits, hn::Set(du32, 0x00400000U)));
}

#if HWY_TARGET == HWY_AVX3_DL
// sum + the dot products of a lane's four unsigned bytes and the four signed bytes at `b`. As text:
// Highway 1.0.3 gives this target AVX-VNNI, not the AVX-512 form, and only text is sure to
// broadcast from memory in the instruction itself.
HWY_INLINE VI32 add_dots(VI32 sum, VU8 a, const void* b) {
  using Quad = const std::int8_t[4];
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "m"(*static_cast<Quad*>(b)));
  return sum;
}
// table[byte % 64] (VPERMB).
HWY_INLINE VU8 look_up_bytes(VU8 table, VU8 index) {
  return VU8{_mm512_permutexvar_epi8(index.raw, table.raw)};
}
#endif

// Sixteen-entry byte table for TableLookupBytes: twice the E2M1 value plus `bias`.
HWY_INLINE VU8 e2m1_table(int bias) {
  alignas(16) std::uint8_t table[16];
  for (int i = 0; i < 16; ++i) table[i] = static_cast<std::uint8_t>(kE2m1TwiceValues[i] + bias);
  return hn::LoadDup128(DU8(), table);
}

// e^x for x <= 0; below -87 it is 0. Relative error below 3e-7: 2^n * p(f), f in [-0.5, 0.5], with
// the Taylor coefficients of 2^f to degree 6 (the next term is 1.2e-7 at the ends).
HWY_INLINE VF exp_non_positive(VF x) {
  const DF df;
  const DI32 di32;
  const VF t = hn::Mul(x, hn::Set(df, 1.4426950408889634F));
  const VF n = hn::Round(hn::Max(t, hn::Set(df, -126.0F)));
  const VF f = hn::Sub(hn::Max(t, hn::Set(df, -126.0F)), n);
  VF p = hn::Set(df, 1.5403530394e-4F);
  p = hn::MulAdd(p, f, hn::Set(df, 1.3333558146e-3F));
  p = hn::MulAdd(p, f, hn::Set(df, 9.6181291076e-3F));
  p = hn::MulAdd(p, f, hn::Set(df, 5.5504108665e-2F));
  p = hn::MulAdd(p, f, hn::Set(df, 0.24022650696F));
  p = hn::MulAdd(p, f, hn::Set(df, 0.69314718056F));
  p = hn::MulAdd(p, f, hn::Set(df, 1.0F));
  const VI32 exponent = hn::ShiftLeft<23>(hn::ConvertTo(di32, n));
  const VF value = hn::BitCast(df, hn::Add(hn::BitCast(di32, p), exponent));
  return hn::IfThenElseZero(hn::Ge(t, hn::Set(df, -125.0F)), value);
}

// cap * tanh(score / cap) for the 64 scores of a tile, in place.
// tanh(x) = (1 - e^-2|x|) / (1 + e^-2|x|) with x's sign.
HWY_INLINE void softcap_scores(float cap, float* HWY_RESTRICT scores) {
  const DF df;
  const VF one = hn::Set(df, 1.0F);
  for (int i = 0; i < 64; i += kLanes) {
    const VF x = hn::Mul(hn::LoadU(df, scores + i), hn::Set(df, 1.0F / cap));
    const VF e = exp_non_positive(hn::Mul(hn::Abs(x), hn::Set(df, -2.0F)));
    const VF t = hn::Div(hn::Sub(one, e), hn::Add(one, e));
    hn::StoreU(hn::Mul(hn::CopySign(t, x), hn::Set(df, cap)), df, scores + i);
  }
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
