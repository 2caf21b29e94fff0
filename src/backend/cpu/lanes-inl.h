// SPDX-License-Identifier: Apache-2.0
// Vectors of at most eight floats, one block of values a lane: what the write and dequantize
// kernels share. Eight lanes are the natural width of the quad-order page (a group of 16 tokens is
// eight ranks of a K fragment), so AVX-512 works on half vectors here.
//
// Everything that decides a code or a scale is the same single IEEE operation, in the same order,
// as in scale/, numeric/ and transform/; comments there give the contract. Per-target.
#if defined(BITDECODING_CPU_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_LANES_INL_H_
#undef BITDECODING_CPU_LANES_INL_H_
#else
#define BITDECODING_CPU_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "transform/hadamard.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using LaneF = hn::CappedTag<float, 8>;
using LaneI = hn::RebindToSigned<LaneF>;
using LaneU = hn::RebindToUnsigned<LaneF>;
using LaneU16 = hn::Rebind<std::uint16_t, LaneF>;
using LaneU8 = hn::Rebind<std::uint8_t, LaneF>;
using LaneBytes = hn::Repartition<std::uint8_t, LaneF>;
using VecF = hn::Vec<LaneF>;
using VecI = hn::Vec<LaneI>;
using VecU = hn::Vec<LaneU>;

inline constexpr int kBlockLanes = static_cast<int>(HWY_MIN(std::size_t{8}, HWY_LANES(float)));
inline constexpr std::uint32_t kSignBit = 0x80000000U;
inline constexpr std::uint32_t kInfinityBits = 0x7F800000U;

HWY_INLINE VecF as_float(VecU v) { return hn::BitCast(LaneF(), v); }
HWY_INLINE VecU as_bits(VecF v) { return hn::BitCast(LaneU(), v); }
HWY_INLINE VecI as_signed(VecU v) { return hn::BitCast(LaneI(), v); }

// Mask of unsigned values below 2^31 that are less than `limit`.
HWY_INLINE hn::Mask<LaneF> below(VecU v, std::uint32_t limit) {
  return hn::RebindMask(LaneF(),
                        hn::Lt(as_signed(v), hn::Set(LaneI(), static_cast<std::int32_t>(limit))));
}

// ---- numbers -----------------------------------------------------------------------------------

// encode_e4m3 of values that are not NaN, sign in bit 7.
HWY_INLINE VecU encode_e4m3_lanes(VecF x) {
  const LaneF df;
  const LaneU du;
  const LaneI di;
  const VecU bits = as_bits(x);
  const VecU magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFU));
  // Below 2^-6: the float sum's low bits are the multiple of 2^-9.
  const VecF two23 = hn::Set(df, 8388608.0F);
  const VecF small = hn::Add(hn::Mul(as_float(magnitude), hn::Set(df, 512.0F)), two23);
  const VecU small_code = hn::Sub(as_bits(small), as_bits(two23));
  const VecU odd = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(du, 1));
  const VecU rounded = hn::Add(hn::Add(magnitude, hn::Set(du, 0x7FFFFU)), odd);
  const VecU normal = hn::Sub(hn::ShiftRight<20>(rounded), hn::Set(du, 120U << 3));
  const VecI top = hn::Min(as_signed(normal), hn::Set(di, kE4m3MaxCode));
  const VecF code =
      hn::IfThenElse(below(magnitude, 121U << 23), as_float(small_code), hn::BitCast(df, top));
  return hn::Or(as_bits(code), hn::ShiftRight<24>(hn::And(bits, hn::Set(du, kSignBit))));
}

HWY_INLINE VecF decode_e4m3_lanes(VecU code) {
  const LaneF df;
  const LaneU du;
  const VecU magnitude = hn::And(code, hn::Set(du, 0x7FU));
  const VecF small = hn::Mul(hn::ConvertTo(df, as_signed(magnitude)), hn::Set(df, 1.0F / 512.0F));
  const VecU normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(du, 120U << 23));
  VecF value = hn::IfThenElse(below(magnitude, 8U), small, as_float(normal));
  value = hn::IfThenElse(below(magnitude, kE4m3Nan), value, as_float(hn::Set(du, 0x7FC00000U)));
  return as_float(hn::Or(as_bits(value), hn::ShiftLeft<24>(hn::And(code, hn::Set(du, 0x80U)))));
}

HWY_INLINE VecF decode_e8m0_lanes(VecU code) {
  const LaneU du;
  const VecI bits = hn::Max(as_signed(hn::ShiftLeft<23>(code)), hn::Set(LaneI(), 0x00400000));
  // Code 255 alone has both its exponent all ones and shifts to infinity: make it NaN.
  return hn::IfThenElse(below(code, kE8m0Nan), hn::BitCast(LaneF(), bits),
                        as_float(hn::Set(du, 0x7FC00000U)));
}

template <bool kMx>
HWY_INLINE VecF decode_scale_lanes(VecU code) {
  if constexpr (kMx) {
    return decode_e8m0_lanes(code);
  } else {
    return decode_e4m3_lanes(code);
  }
}

// IEEE halves in the low 16 bits. Written out: not every target's conversion handles infinity, NaN
// and subnormals.
HWY_INLINE VecF decode_f16_lanes(VecU half) {
  const LaneF df;
  const LaneU du;
  const VecU magnitude = hn::And(half, hn::Set(du, 0x7FFFU));
  const VecF small =
      hn::Mul(hn::ConvertTo(df, as_signed(magnitude)), hn::Set(df, 1.0F / 16777216.0F));
  const VecU normal = hn::Add(hn::ShiftLeft<13>(magnitude), hn::Set(du, 112U << 23));
  const VecU special = hn::Or(hn::ShiftLeft<13>(magnitude), hn::Set(du, kInfinityBits));
  VecF value = hn::IfThenElse(below(magnitude, 0x400U), small, as_float(normal));
  value = hn::IfThenElse(below(magnitude, 0x7C00U), value, as_float(special));
  return as_float(hn::Or(as_bits(value), hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000U)))));
}

// ---- moving lanes ------------------------------------------------------------------------------

// out[c][r] = in[r][c] for kBlockLanes rows and columns.
HWY_INLINE void transpose_square(const float* HWY_RESTRICT in, std::int64_t stride_in,
                                 float* HWY_RESTRICT out, std::int64_t stride_out) {
  const LaneF df;
  const hn::RepartitionToWide<LaneU> du64;
  // Four columns of four rows in each 128-bit half: rows 0-3 in quads[0..3], rows 4-7 in [4..7].
  VecF quads[kBlockLanes];
#pragma GCC unroll 2
  for (int r = 0; r < kBlockLanes; r += 4) {
    const VecF r0 = hn::LoadU(df, in + r * stride_in);
    const VecF r1 = hn::LoadU(df, in + (r + 1) * stride_in);
    const VecF r2 = hn::LoadU(df, in + (r + 2) * stride_in);
    const VecF r3 = hn::LoadU(df, in + (r + 3) * stride_in);
    const auto low01 = hn::BitCast(du64, hn::InterleaveLower(df, r0, r1));
    const auto high01 = hn::BitCast(du64, hn::InterleaveUpper(df, r0, r1));
    const auto low23 = hn::BitCast(du64, hn::InterleaveLower(df, r2, r3));
    const auto high23 = hn::BitCast(du64, hn::InterleaveUpper(df, r2, r3));
    quads[r] = hn::BitCast(df, hn::InterleaveLower(du64, low01, low23));
    quads[r + 1] = hn::BitCast(df, hn::InterleaveUpper(du64, low01, low23));
    quads[r + 2] = hn::BitCast(df, hn::InterleaveLower(du64, high01, high23));
    quads[r + 3] = hn::BitCast(df, hn::InterleaveUpper(du64, high01, high23));
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    if constexpr (kBlockLanes == 8) {
      const VecF low = quads[c];
      const VecF high = quads[kBlockLanes - 4 + c];
      hn::StoreU(hn::ConcatLowerLower(df, high, low), df, out + c * stride_out);
      hn::StoreU(hn::ConcatUpperUpper(df, high, low), df, out + (c + 4) * stride_out);
    } else {
      hn::StoreU(quads[c], df, out + c * stride_out);
    }
  }
}

// ---- Hadamard ----------------------------------------------------------------------------------

// The stages of stride 1, 2, 4, ... over `block` vectors, lane by lane; then the product with
// `scale`. Two stages in one pass over memory.
HWY_INLINE void hadamard_vectors(float* HWY_RESTRICT x, int block, VecF scale) {
  const LaneF df;
  int stride = 1;
  for (; stride * 4 <= block; stride *= 4) {
    const bool last = stride * 4 == block;
    for (int i = 0; i < block; i += 4 * stride) {
      for (int j = i; j < i + stride; ++j) {
        float* HWY_RESTRICT p = x + std::int64_t{j} * kBlockLanes;
        const std::int64_t step = std::int64_t{stride} * kBlockLanes;
        const VecF a = hn::LoadU(df, p);
        const VecF b = hn::LoadU(df, p + step);
        const VecF c = hn::LoadU(df, p + 2 * step);
        const VecF d = hn::LoadU(df, p + 3 * step);
        const VecF ab = hn::Add(a, b);
        const VecF ab_minus = hn::Sub(a, b);
        const VecF cd = hn::Add(c, d);
        const VecF cd_minus = hn::Sub(c, d);
        VecF y0 = hn::Add(ab, cd);
        VecF y1 = hn::Add(ab_minus, cd_minus);
        VecF y2 = hn::Sub(ab, cd);
        VecF y3 = hn::Sub(ab_minus, cd_minus);
        if (last) {
          y0 = hn::Mul(y0, scale);
          y1 = hn::Mul(y1, scale);
          y2 = hn::Mul(y2, scale);
          y3 = hn::Mul(y3, scale);
        }
        hn::StoreU(y0, df, p);
        hn::StoreU(y1, df, p + step);
        hn::StoreU(y2, df, p + 2 * step);
        hn::StoreU(y3, df, p + 3 * step);
      }
    }
  }
  if (stride == block) return;
  for (int j = 0; j < stride; ++j) {
    float* HWY_RESTRICT p = x + std::int64_t{j} * kBlockLanes;
    const std::int64_t step = std::int64_t{stride} * kBlockLanes;
    const VecF a = hn::LoadU(df, p);
    const VecF b = hn::LoadU(df, p + step);
    hn::StoreU(hn::Mul(hn::Add(a, b), scale), df, p);
    hn::StoreU(hn::Mul(hn::Sub(a, b), scale), df, p + step);
  }
}

// a + b in the lanes without bit `stride` of their index, a - b in the others: b - a would be the
// partner's sum with the own sign changed, which is the same single rounding.
HWY_INLINE VecF butterfly(VecF own, VecF partner, VecF flip) {
  return hn::Add(partner, hn::Xor(own, flip));
}

// hadamard() of one row: strides below a vector inside it, the others between vectors.
inline void hadamard_row(float* HWY_RESTRICT x, int head_dim) {
  alignas(32) static constexpr std::uint32_t kFlip[3][8] = {
      {0, kSignBit, 0, kSignBit, 0, kSignBit, 0, kSignBit},
      {0, 0, kSignBit, kSignBit, 0, 0, kSignBit, kSignBit},
      {0, 0, 0, 0, kSignBit, kSignBit, kSignBit, kSignBit}};
  const LaneF df;
  const LaneU du;
  const int block = hadamard_block(head_dim);
  const VecF scale = hn::Set(df, hadamard_scale(block));
  const VecF flip1 = as_float(hn::LoadU(du, kFlip[0]));
  const VecF flip2 = as_float(hn::LoadU(du, kFlip[1]));
  const VecF flip4 = as_float(hn::LoadU(du, kFlip[2]));
  for (int i = 0; i < head_dim; i += kBlockLanes) {
    VecF v = hn::LoadU(df, x + i);
    v = butterfly(v, hn::Shuffle2301(v), flip1);
    v = butterfly(v, hn::Shuffle1032(v), flip2);
    if constexpr (kBlockLanes == 8) v = butterfly(v, hn::ConcatLowerUpper(df, v, v), flip4);
    hn::StoreU(v, df, x + i);
  }
  for (int base = 0; base < head_dim; base += block) {
    hadamard_vectors(x + base, block / kBlockLanes, scale);
  }
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
