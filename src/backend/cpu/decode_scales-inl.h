// SPDX-License-Identifier: Apache-2.0
// Block scales of a tile as the integers that decode_pairs-inl.h multiplies by. Per-target.
//
// A scale becomes m = scale * 2^k, k such that the largest scale of the fragment row has its
// leading bit at 2^11..2^13 (scale_bits): E4M3 scales down to 2^-8 of it are exact, smaller ones
// are rounded to a multiple of 2^-12 of it or finer.
#if defined(BITDECODING_CPU_DECODE_SCALES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DECODE_SCALES_INL_H_
#undef BITDECODING_CPU_DECODE_SCALES_INL_H_
#else
#define BITDECODING_CPU_DECODE_SCALES_INL_H_
#endif

#include <cstdint>

#include "backend/cpu/ops-inl.h"
#include "page/layout.h"

#if HWY_TARGET != HWY_AVX3_DL
HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

// Leading bit of the largest integer scale for a sum over so many blocks of 16.
constexpr int scale_bits(int blocks) { return blocks <= 4 ? 13 : (blocks <= 8 ? 12 : 11); }

template <bool kMx>
HWY_INLINE VF load_scales(const std::uint8_t* HWY_RESTRICT p) {
  if constexpr (kMx) {
    return load_e8m0(p);
  } else {
    return load_e4m3(p);
  }
}

// Block scales of fragments -> integers and units, see FragmentRun.
template <bool kMx>
HWY_INLINE void convert_scales(const std::uint8_t* HWY_RESTRICT bytes, int groups, int blocks,
                               int stride, std::int32_t* HWY_RESTRICT scales,
                               float* HWY_RESTRICT units) {
  constexpr int kColumns = kMx ? 2 : 1;  // blocks of 16 that share a scale
  const DF df;
  const DI32 di32;
  const hn::Rebind<std::uint8_t, DF> du8;
  const int bits = scale_bits(blocks);
  const VI32 base = hn::Set(di32, (254 + bits) << 23);
  const VI32 shift = hn::Set(di32, bits << 23);
  for (int group = 0; group < groups; ++group) {
    for (int pass = 0; pass < kRowVectors; ++pass) {
      const std::uint8_t* HWY_RESTRICT p = bytes + 16 * (group * stride / kColumns) + kLanes * pass;
      auto top = hn::LoadU(du8, p);  // the order of bytes is the order of scales
      for (int b = 1; b < blocks / kColumns; ++b) top = hn::Max(top, hn::LoadU(du8, p + 16 * b));
      alignas(64) std::uint8_t top_bytes[kLanes];
      hn::Store(top, du8, top_bytes);
      // 2^E of the largest; below 2^-107 (MX only) all of the row's values are as good as 0.
      const VI32 exponent = hn::Max(
          hn::And(hn::BitCast(di32, load_scales<kMx>(top_bytes)), hn::Set(di32, 0x7F800000)),
          hn::Set(di32, 20 << 23));
      const VF factor = hn::BitCast(df, hn::Sub(base, exponent));
      hn::Store(hn::BitCast(df, hn::Sub(exponent, shift)), df, units + 16 * group + kLanes * pass);
      for (int b = 0; b < blocks / 2; ++b) {
        const std::uint8_t* HWY_RESTRICT q = p + 16 * (2 / kColumns) * b;
        const VI32 first = hn::NearestInt(hn::Mul(load_scales<kMx>(q), factor));
        const VI32 second = kMx ? first : hn::NearestInt(hn::Mul(load_scales<kMx>(q + 16), factor));
        hn::Store(hn::Or(first, hn::ShiftLeft<16>(second)), di32,
                  scales + 16 * (group * (blocks / 2) + b) + kLanes * pass);
      }
    }
  }
}

// The same for E4M3 and one term, in integers. Bytes of two blocks are interleaved as the result
// is: a word is a row's, its bytes the blocks'. A scale is its significand, 0..15, times
// 2^(exponent), and becomes (significand << 12) * 2^(exponent - E + bits + 1) >> 16, E the largest
// exponent of the row: exact down to 2^-(bits - 3) of the largest, cut off to a multiple of 2^-bits
// of it below.
inline void convert_e4m3_scales(const std::uint8_t* HWY_RESTRICT bytes, int groups, int blocks,
                                int stride, std::int32_t* HWY_RESTRICT scales,
                                float* HWY_RESTRICT units) {
  const hn::FixedTag<std::uint8_t, 16> du8;
  const hn::Repartition<std::uint16_t, decltype(du8)> du16;
  const hn::Repartition<std::uint32_t, decltype(du8)> du32;
  const hn::Repartition<float, decltype(du8)> df;
  const int bits = scale_bits(blocks);
  alignas(16) std::uint8_t exponents[16];  // of the byte's exponent field; a subnormal's is 1
  alignas(16) std::uint8_t hidden[16];
  alignas(16) std::uint8_t low[16];  // 2^i, low byte and high byte; 0 for what is cut off
  alignas(16) std::uint8_t high[16];
  for (int i = 0; i < 16; ++i) {
    exponents[i] = static_cast<std::uint8_t>((i == 0 ? 1 : i) + bits + 1);
    hidden[i] = i == 0 ? 0 : 0x80;
    low[i] = static_cast<std::uint8_t>(i == 0 || i > 7 ? 0 : 1 << i);
    high[i] = static_cast<std::uint8_t>(i > 7 ? 1 << (i - 8) : 0);
  }
  const auto exponent_table = hn::Load(du8, exponents);
  const auto hidden_table = hn::Load(du8, hidden);
  const auto low_table = hn::Load(du8, low);
  const auto high_table = hn::Load(du8, high);
  const auto nibble = hn::Set(du8, 0x0F);
  const auto exponent_of = [&](auto v) HWY_ATTR {
    return hn::And(hn::BitCast(du8, hn::ShiftRight<3>(hn::BitCast(du16, v))), nibble);
  };
  const auto zero = hn::Zero(du8);
  for (int group = 0; group < groups; ++group) {
    const std::uint8_t* HWY_RESTRICT p = bytes + 16 * group * stride;
    auto top = hn::Load(du8, p);
    for (int b = 1; b < blocks; ++b) top = hn::Max(top, hn::Load(du8, p + 16 * b));
    const auto largest = hn::Max(exponent_of(top), hn::Set(du8, 1));
    // Units 2^(E - 7 - 3 - (bits - 3)) / 256 (kE4m3Unit), rows in order.
    const auto words_low = hn::InterleaveLower(du8, largest, zero);
    const auto words_high = hn::InterleaveUpper(du8, largest, zero);
    const auto store_units = [&](auto words, int at) HWY_ATTR {
      const auto biased = hn::Add(hn::BitCast(du32, words), hn::Set(du32, 127U - 15U - bits));
      hn::Store(hn::BitCast(df, hn::ShiftLeft<23>(biased)), df, units + 16 * group + at);
    };
    store_units(hn::InterleaveLower(du16, hn::BitCast(du16, words_low), hn::Zero(du16)), 0);
    store_units(hn::InterleaveUpper(du16, hn::BitCast(du16, words_low), hn::Zero(du16)), 4);
    store_units(hn::InterleaveLower(du16, hn::BitCast(du16, words_high), hn::Zero(du16)), 8);
    store_units(hn::InterleaveUpper(du16, hn::BitCast(du16, words_high), hn::Zero(du16)), 12);
    const auto largest_low = hn::InterleaveLower(du8, largest, largest);
    const auto largest_high = hn::InterleaveUpper(du8, largest, largest);
    std::int32_t* HWY_RESTRICT out = scales + 8 * group * blocks;
    const auto convert = [&](auto v, auto largest_of_rows, std::int32_t* HWY_RESTRICT to) HWY_ATTR {
      const auto e = exponent_of(v);
      const auto mantissa =
          hn::And(hn::BitCast(du8, hn::ShiftLeft<4>(hn::BitCast(du16, v))), hn::Set(du8, 0x70));
      const auto significand = hn::Or(mantissa, hn::TableLookupBytes(hidden_table, e));
      const auto i = hn::SaturatedSub(hn::TableLookupBytes(exponent_table, e), largest_of_rows);
      const auto power_low = hn::TableLookupBytes(low_table, i);
      const auto power_high = hn::TableLookupBytes(high_table, i);
      const auto multiply = [&](auto a, auto b) HWY_ATTR {
        return hn::BitCast(du32, hn::MulHigh(hn::BitCast(du16, a), hn::BitCast(du16, b)));
      };
      const hn::Repartition<std::int32_t, decltype(du8)> di32;
      hn::Store(hn::BitCast(di32, multiply(hn::InterleaveLower(du8, zero, significand),
                                           hn::InterleaveLower(du8, power_low, power_high))),
                di32, to);
      hn::Store(hn::BitCast(di32, multiply(hn::InterleaveUpper(du8, zero, significand),
                                           hn::InterleaveUpper(du8, power_low, power_high))),
                di32, to + 4);
    };
    for (int b = 0; b < blocks; b += 2, out += 16) {
      const auto first = hn::Load(du8, p + 16 * b);
      const auto second = hn::Load(du8, p + 16 * b + 16);
      convert(hn::InterleaveLower(du8, first, second), largest_low, out);
      convert(hn::InterleaveUpper(du8, first, second), largest_high, out + 8);
    }
  }
}

template <int kTerms, bool kMx>
HWY_INLINE void make_scales(const std::uint8_t* HWY_RESTRICT bytes, int groups, int blocks,
                            int stride, std::int32_t* HWY_RESTRICT scales,
                            float* HWY_RESTRICT units) {
  if constexpr (kTerms == 1 && !kMx) {
    convert_e4m3_scales(bytes, groups, blocks, stride, scales, units);
  } else {
    convert_scales<kMx>(bytes, groups, blocks, stride, scales, units);
  }
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // not AVX3_DL

#endif  // per-target include guard
