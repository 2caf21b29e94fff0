// What both forms of the decode products share: block scales, the order of tokens, exponentials of
// probabilities. Per-target.
#if defined(BITDECODING_CPU_DECODE_COMMON_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_COMMON_INL_H_
#undef BITDECODING_CPU_DECODE_COMMON_INL_H_
#else
#define BITDECODING_CPU_DECODE_COMMON_INL_H_
#endif

#include <cstdint>

#include "backend/cpu/ops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

// With two terms the high one counts this often.
inline constexpr int kTermWeight = 128;

template <bool kMx>
HWY_INLINE VF load_scales(const std::uint8_t* HWY_RESTRICT p) {
  if constexpr (kMx) {
    return load_e8m0(p);
  } else {
    return load_e4m3(p);
  }
}

// Tile token of position i in kQuad order: row group i / 16, rank i % 16.
constexpr int quad_token(int i) {
  const int group = i / 16;
  const int rank = i % 16;
  return 32 * (group / 2) + 8 * (rank / 4) + 4 * (group % 2) + rank % 4;
}

// levels * 2^t for t <= 0, as the nearest integer. Below t = -40 it is 0 for every number of levels
// here. One term has 127 levels: a cubic (relative error 7.5e-5, a hundredth of a level) is enough.
// Two have 16383: degree 5 (7.5e-8, below float's own rounding). Both are minimax on [-0.5, 0.5].
template <int kTerms>
HWY_INLINE VI32 exp2_levels(VF t, VF levels) {
  const DF df;
  const DI32 di32;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const VF magic = hn::Set(df, 12582912.0F);
  const VF x = hn::Max(t, hn::Set(df, -40.0F));
  const VF shifted = hn::Add(x, magic);
  const VF f = hn::Sub(x, hn::Sub(shifted, magic));
  VF p;
  if constexpr (kTerms == 1) {
    p = hn::MulAdd(hn::Set(df, 0.05517165268F), f, hn::Set(df, 0.2426111209F));
    p = hn::MulAdd(p, f, hn::Set(df, 0.6932609885F));
    p = hn::MulAdd(p, f, hn::Set(df, 0.9999280737F));
  } else {
    p = hn::MulAdd(hn::Set(df, 1.327647012e-3F), f, hn::Set(df, 9.675541319e-3F));
    p = hn::MulAdd(p, f, hn::Set(df, 0.05550713279F));
    p = hn::MulAdd(p, f, hn::Set(df, 0.2402211972F));
    p = hn::MulAdd(p, f, hn::Set(df, 0.6931469671F));
    p = hn::MulAdd(p, f, hn::Set(df, 1.0F));
  }
  const VI32 exponent = hn::ShiftLeft<23>(hn::BitCast(di32, shifted));
  const VF power = hn::BitCast(df, hn::Add(hn::BitCast(di32, p), exponent));
  return hn::NearestInt(hn::Mul(power, levels));
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
