// SPDX-License-Identifier: Apache-2.0
// Scale rules and 4-bit codes of kBlockLanes blocks at once, one block a lane: scale/ in vectors,
// bit for bit. Value i of all blocks is the vector at x + i * stride. The squares' tree sum, the
// true divisions and the order of the candidates are scale/block.h's contract. Per-target.
//
// Cost of one candidate scale: a division and eleven cheap operations a value; the codes cost a
// division and about fifteen. four_six is two candidates and the codes.
#if defined(BITDECODING_CPU_BLOCK_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_BLOCK_CODES_INL_H_
#undef BITDECODING_CPU_BLOCK_CODES_INL_H_
#else
#define BITDECODING_CPU_BLOCK_CODES_INL_H_
#endif

#include "backend/cpu/lanes-inl.h"
#include "bitdecoding/quantize.h"
#include "bitdecoding/recipe.h"
#include "scale/rules.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

// Magnitudes (not NaN) to the nearest of 0 .5 1 1.5 2 3 4 6, ties to even: above 1 that is float's
// own rounding to one mantissa bit, below it the rounding to halves. Adding 2^22 times the power of
// two below m (at least 1) leaves just those bits.
HWY_INLINE VecF round_e2m1(VecF m) {
  const LaneF df;
  const LaneI di;
  const VecF capped = hn::Min(m, hn::Set(df, kE2m1Max));
  const VecF power =
      hn::Max(hn::And(capped, as_float(hn::Set(LaneU(), kInfinityBits))), hn::Set(df, 1.0F));
  const VecF magic =
      hn::BitCast(df, hn::Add(hn::BitCast(di, power), hn::Set(di, std::int32_t{22} << 23)));
  return hn::Sub(hn::Add(capped, magic), magic);
}

// A scale to divide by: 1 where it is zero, so that 0 / 0 does not arise. The product with the
// scale itself is zero there all the same.
HWY_INLINE VecF divisor_of(VecF scale) {
  const LaneF df;
  return hn::IfThenElse(hn::Eq(scale, hn::Zero(df)), hn::Set(df, 1.0F), scale);
}

HWY_INLINE VecF block_amax_lanes(const float* HWY_RESTRICT x, std::int64_t stride, int n) {
  const LaneF df;
  VecF amax = hn::Zero(df);
  for (int i = 0; i < n; ++i) amax = hn::Max(hn::Abs(hn::LoadU(df, x + i * stride)), amax);
  return amax;
}

// block_squared_error, and block_squared_norm where the scale is zero. The sum over i, i + step,
// i + 2 step, ... of a block of n, in the tree's order.
template <int kCount, int kStep>
HWY_INLINE VecF squared_error_tree(const float* HWY_RESTRICT x, std::int64_t stride, int i,
                                   VecF divisor, VecF scale) {
  if constexpr (kStep == kCount) {
    const VecF m = hn::Abs(hn::LoadU(LaneF(), x + i * stride));
    const VecF d = hn::Sub(m, hn::Mul(round_e2m1(hn::Div(m, divisor)), scale));
    return hn::Mul(d, d);
  } else {
    return hn::Add(squared_error_tree<kCount, 2 * kStep>(x, stride, i, divisor, scale),
                   squared_error_tree<kCount, 2 * kStep>(x, stride, i + kStep, divisor, scale));
  }
}

template <int kCount>
HWY_INLINE VecF squared_error_lanes(const float* HWY_RESTRICT x, std::int64_t stride, VecF scale) {
  return squared_error_tree<kCount, 1>(x, stride, 0, divisor_of(scale), scale);
}

// ---- rules: scale codes of blocks whose maxima are amax ----------------------------------------

HWY_INLINE VecU choose_amax6(VecF amax, VecF outer) {
  return encode_e4m3_lanes(hn::Div(hn::Div(amax, hn::Set(LaneF(), 6.0F)), outer));
}

inline VecU choose_four_six(const float* HWY_RESTRICT x, std::int64_t stride, VecF amax,
                            VecF outer) {
  const LaneF df;
  // A zero `four` means a zero `six`: the errors are equal and `six`, zero, is taken.
  const VecU six = choose_amax6(amax, outer);
  const VecU four = encode_e4m3_lanes(hn::Div(hn::Div(amax, hn::Set(df, 4.0F)), outer));
  const VecF error_six = squared_error_lanes<16>(x, stride, hn::Mul(decode_e4m3_lanes(six), outer));
  const VecF error_four =
      squared_error_lanes<16>(x, stride, hn::Mul(decode_e4m3_lanes(four), outer));
  return as_bits(hn::IfThenElse(hn::Lt(error_four, error_six), as_float(four), as_float(six)));
}

inline VecU choose_code_search(const float* HWY_RESTRICT x, std::int64_t stride, VecF amax,
                               VecF outer) {
  constexpr int kOffsets[5] = {0, -1, 1, 4, 5};
  const LaneF df;
  const LaneI di;
  const VecI base = as_signed(choose_amax6(amax, outer));
  VecF best_error = squared_error_lanes<16>(x, stride, hn::Zero(df));
  VecU best = as_bits(hn::IfThenZeroElse(
      hn::Lt(best_error, as_float(hn::Set(LaneU(), kInfinityBits))), hn::BitCast(df, base)));
  for (const int offset : kOffsets) {
    const VecI raw = hn::Add(base, hn::Set(di, offset));
    const VecI code = hn::Min(hn::Max(raw, hn::Set(di, 1)), hn::Set(di, kE4m3MaxCode));
    const VecU bits = hn::BitCast(LaneU(), code);
    const VecF error = squared_error_lanes<16>(x, stride, hn::Mul(decode_e4m3_lanes(bits), outer));
    const auto better = hn::And(hn::RebindMask(df, hn::Eq(raw, code)), hn::Lt(error, best_error));
    best_error = hn::IfThenElse(better, error, best_error);
    best = as_bits(hn::IfThenElse(better, as_float(bits), as_float(best)));
  }
  return best;
}

// E8M0 codes of the exponents floor(log2(amax)) - 2 + offset, clamped to the codes there are.
// Subnormal maxima have exponent field 0 and end at code 0 for every offset, as they must.
HWY_INLINE VecU e8m0_candidate(VecF amax, int offset) {
  const LaneI di;
  const VecI exponent = as_signed(hn::ShiftRight<23>(as_bits(amax)));
  const VecI code = hn::Add(exponent, hn::Set(di, offset - 2));
  return hn::BitCast(LaneU(),
                     hn::Min(hn::Max(code, hn::Zero(di)), hn::Set(di, std::int32_t{kE8m0MaxCode})));
}

inline VecU choose_mxfp4_search(const float* HWY_RESTRICT x, std::int64_t stride, VecF amax,
                                VecF outer) {
  constexpr int kOffsets[2] = {1, -1};
  VecU best = e8m0_candidate(amax, 0);
  VecF best_error = squared_error_lanes<32>(x, stride, hn::Mul(decode_e8m0_lanes(best), outer));
  for (const int offset : kOffsets) {
    const VecU code = e8m0_candidate(amax, offset);
    const VecF error = squared_error_lanes<32>(x, stride, hn::Mul(decode_e8m0_lanes(code), outer));
    const auto better = hn::Lt(error, best_error);
    best_error = hn::IfThenElse(better, error, best_error);
    best = as_bits(hn::IfThenElse(better, as_float(code), as_float(best)));
  }
  return best;
}

template <bool kMx>
HWY_INLINE VecU choose_scale_lanes(ScaleRule rule, const float* HWY_RESTRICT x, std::int64_t stride,
                                   VecF amax, VecF outer) {
  const LaneF df;
  if constexpr (kMx) {
    const VecF relative = hn::Div(amax, outer);
    const VecU code = rule == ScaleRule::kMxfp4Search
                          ? choose_mxfp4_search(x, stride, relative, outer)
                          : e8m0_candidate(relative, 0);
    return as_bits(hn::IfThenZeroElse(hn::Eq(relative, hn::Zero(df)), as_float(code)));
  } else {
    switch (rule) {
      case ScaleRule::kFourSix:
        return choose_four_six(x, stride, amax, outer);
      case ScaleRule::kCodeSearch:
        return choose_code_search(x, stride, amax, outer);
      default:
        return choose_amax6(amax, outer);
    }
  }
}

// ---- codes -------------------------------------------------------------------------------------

// Codes of the four values x[first], x[first + step], ... of every block, a byte each.
HWY_INLINE VecU encode_four(const float* HWY_RESTRICT x, std::int64_t stride, int first, int step,
                            VecF divisor) {
  // 2^22 + m has 2m in its low bits. Four such words, each shifted by a byte more than the next,
  // add up to the four bytes and this constant.
  constexpr std::uint32_t kTwo22Bits = 0x4A800000U;
  constexpr std::uint32_t kBias =
      kTwo22Bits + (kTwo22Bits << 8) + (kTwo22Bits << 16) + (kTwo22Bits << 24);
  alignas(16) static constexpr std::uint8_t kCodeOfTwice[16] = {0, 1, 2, 3, 4, 0, 5, 0,
                                                                6, 0, 0, 0, 7, 0, 0, 0};
  const LaneF df;
  const LaneU du;
  const LaneBytes bytes;
  const VecF two22 = as_float(hn::Set(du, kTwo22Bits));
  const VecU sign = hn::Set(du, kSignBit);
  VecU twice = hn::Zero(du);
  VecU signs = hn::Zero(du);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    // Signs travel down from the first value, twice the magnitudes up from the last.
    const VecF up = hn::LoadU(df, x + (first + step * (3 - j)) * stride);
    const VecF down = hn::LoadU(df, x + (first + step * j) * stride);
    const VecU m = as_bits(hn::Add(round_e2m1(hn::Div(hn::Abs(up), divisor)), two22));
    twice = j == 0 ? m : hn::Add(hn::ShiftLeft<8>(twice), m);
    const VecU s = hn::And(as_bits(down), sign);
    signs = j == 0 ? s : hn::Or(hn::ShiftRight<8>(signs), s);
  }
  const auto index = hn::BitCast(bytes, hn::Sub(twice, hn::Set(du, kBias)));
  const auto codes = hn::TableLookupBytes(hn::LoadDup128(bytes, kCodeOfTwice), index);
  return hn::Or(hn::BitCast(du, codes), hn::ShiftRight<4>(signs));
}

// Words of eight codes: kRows as row formats store them (value 2i in the low nibble of byte i),
// else in kQuad order (value i in the low, value i + 4 in the high nibble of byte i).
template <bool kRows>
HWY_INLINE VecU encode_eight(const float* HWY_RESTRICT x, std::int64_t stride, int first,
                             VecF divisor) {
  const VecU low = encode_four(x, stride, first, kRows ? 2 : 1, divisor);
  const VecU high = encode_four(x, stride, first + (kRows ? 1 : 4), kRows ? 2 : 1, divisor);
  return hn::Or(low, hn::ShiftLeft<4>(high));
}

// Quantizes kBlockLanes blocks. Words of eight codes go to words + 8-value chunk * stride_words
// (bytes), one word a lane; the scale codes to `scales`, one byte a lane.
template <bool kMx, bool kRows>
HWY_INLINE void quantize_lanes(ScaleRule rule, float outer_scale, const float* HWY_RESTRICT x,
                               std::int64_t stride, std::uint8_t* HWY_RESTRICT words,
                               std::int64_t stride_words, std::uint8_t* HWY_RESTRICT scales,
                               WriteCounters* tally) {
  constexpr int kCount = kMx ? 32 : 16;
  const LaneF df;
  const LaneU du;
  const VecF outer = hn::Set(df, outer_scale);
  const VecF zero = hn::Zero(df);
  const VecF amax = block_amax_lanes(x, stride, kCount);
  const VecU code = choose_scale_lanes<kMx>(rule, x, stride, amax, outer);
  const VecF own_scale = decode_scale_lanes<kMx>(code);
  const VecF scale = hn::Mul(own_scale, outer);
  const VecF divisor = divisor_of(scale);
  const auto no_scale = hn::Eq(scale, zero);
#pragma GCC unroll 4
  for (int chunk = 0; chunk < kCount / 8; ++chunk) {
    const VecU word = encode_eight<kRows>(x, stride, 8 * chunk, divisor);
    const VecU kept = as_bits(hn::IfThenZeroElse(no_scale, as_float(word)));
    hn::StoreU(hn::BitCast(LaneBytes(), kept), LaneBytes(), words + chunk * stride_words);
  }
  hn::StoreU(hn::TruncateTo(LaneU8(), hn::BitCast(du, code)), LaneU8(), scales);
  constexpr Format kFormat = kMx ? Format::kMxfp4 : Format::kNvfp4;
  const VecF limit = hn::Set(df, largest_block_value(kFormat, outer_scale));
  const auto saturated = hn::Gt(amax, limit);
  const auto flushed = hn::And(hn::Gt(amax, zero), hn::Eq(own_scale, zero));
  if (HWY_UNLIKELY(!hn::AllFalse(df, hn::Or(saturated, flushed)))) {
    tally->saturated_blocks += hn::CountTrue(df, saturated);
    tally->flushed_blocks += hn::CountTrue(df, flushed);
  }
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
