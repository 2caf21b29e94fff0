// SPDX-License-Identifier: Apache-2.0
// A tile back to floats, per-target. Every product and sum is the reference's: code times (block
// scale times outer scale), the Hadamard stages in their order, then the shift.
#if defined(BITDECODING_CPU_DEQUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_DEQUANTIZE_INL_H_
#undef BITDECODING_CPU_DEQUANTIZE_INL_H_
#else
#define BITDECODING_CPU_DEQUANTIZE_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "backend/cpu/dequantize_kernels.h"
#include "backend/cpu/lanes-inl.h"
#include "page/layout.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

inline constexpr int kMaxTileDims = 256;

// The two bytes of the BF16 form of each E2M1 code; -0 keeps its sign.
alignas(16) inline constexpr std::uint8_t kE2m1HighByte[16] = {
    0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
alignas(16) inline constexpr std::uint8_t kE2m1LowByte[16] = {
    0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0, 0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};

// Values of the four codes in the low nibbles of a word's bytes.
HWY_INLINE void decode_four(VecU codes, VecF* HWY_RESTRICT out) {
  const LaneU du;
  const LaneBytes bytes;
  const auto index = hn::BitCast(bytes, codes);
  const VecU high =
      hn::BitCast(du, hn::TableLookupBytes(hn::LoadDup128(bytes, kE2m1HighByte), index));
  const VecU low =
      hn::BitCast(du, hn::TableLookupBytes(hn::LoadDup128(bytes, kE2m1LowByte), index));
  const VecU odd_bytes = hn::Set(du, 0xFF00FF00U);
  const VecU even_bytes = hn::Set(du, 0x00FF00FFU);
  // BF16 pairs: values 0 (low half) and 2, values 1 and 3.
  const VecU pair02 = hn::Or(hn::And(hn::ShiftLeft<8>(high), odd_bytes), hn::And(low, even_bytes));
  const VecU pair13 = hn::Or(hn::And(high, odd_bytes), hn::And(hn::ShiftRight<8>(low), even_bytes));
  const VecU upper = hn::Set(du, 0xFFFF0000U);
  out[0] = as_float(hn::ShiftLeft<16>(pair02));
  out[1] = as_float(hn::ShiftLeft<16>(pair13));
  out[2] = as_float(hn::And(pair02, upper));
  out[3] = as_float(hn::And(pair13, upper));
}

// Values of a quad-order word of eight columns.
HWY_INLINE void decode_eight(VecU word, VecF* HWY_RESTRICT out) {
  const VecU nibbles = hn::Set(LaneU(), 0x0F0F0F0FU);
  decode_four(hn::And(word, nibbles), out);
  decode_four(hn::And(hn::ShiftRight<4>(word), nibbles), out + 4);
}

template <bool kMx>
HWY_INLINE hn::Mask<LaneF> corrupt_lanes(VecU scale_codes) {
  const LaneU du;
  const VecU compared = kMx ? scale_codes : hn::And(scale_codes, hn::Set(du, 0x7FU));
  return hn::RebindMask(LaneF(), hn::Eq(compared, hn::Set(du, kMx ? kE8m0Nan : kE4m3Nan)));
}

// Mask of the lanes whose token, first + lane, is below `end`.
HWY_INLINE hn::Mask<LaneF> lanes_below(int first, int end) {
  const LaneI di;
  return hn::RebindMask(LaneF(), hn::Lt(hn::Iota(di, first), hn::Set(di, end)));
}

// ---- tiled formats -----------------------------------------------------------------------------

// kBlockLanes tokens from `token` on are the same four ranks of one or two neighbouring row groups:
// tokens 8 k .. 8 k + 3 of the even, 8 k + 4 .. 8 k + 7 of the odd one.
struct TokenLanes {
  std::int64_t first_group;
  int rank;
  explicit TokenLanes(int token)
      : first_group(layout::key_row_group(token)), rank(layout::key_quad_rank(token)) {}
};

HWY_INLINE VecU load_rank_words(const std::uint8_t* HWY_RESTRICT group, std::int64_t group_stride) {
  alignas(32) std::uint8_t words[4 * kBlockLanes];
  std::memcpy(words, group, 16);
  if constexpr (kBlockLanes == 8) std::memcpy(words + 16, group + group_stride, 16);
  return hn::BitCast(LaneU(), hn::LoadU(LaneBytes(), words));
}

HWY_INLINE VecU load_rank_bytes(const std::uint8_t* HWY_RESTRICT group, std::int64_t group_stride) {
  alignas(8) std::uint8_t bytes[kBlockLanes];
  std::memcpy(bytes, group, 4);
  if constexpr (kBlockLanes == 8) std::memcpy(bytes + 4, group + group_stride, 4);
  return hn::PromoteTo(LaneU(), hn::LoadU(LaneU8(), bytes));
}

// kBlockLanes tokens of K, still shifted and rotated: x[dim][lane]. Returns the corrupt scale bytes
// of the lanes of `valid`.
template <bool kMx>
HWY_INLINE int decode_keys(const DequantizeArgs& args, int token, hn::Mask<LaneF> valid,
                           float* HWY_RESTRICT x) {
  constexpr Format kFormat = kMx ? Format::kMxfp4 : Format::kNvfp4;
  constexpr int kCount = kMx ? 32 : 16;
  constexpr std::int64_t kScaleBytes = layout::fragment_scale_bytes(kFormat);
  const LaneF df;
  const layout::TileParts parts = layout::tile_parts(kFormat, args.head_dim);
  const std::int64_t column_blocks = layout::key_column_blocks(args.head_dim);
  const VecF outer = hn::Set(df, args.key_outer);
  const TokenLanes lanes(token);
  std::size_t corrupt = 0;
  for (int dim = 0; dim < args.head_dim; dim += kCount) {
    const std::int64_t fragment = lanes.first_group * column_blocks + dim / 64;
    const std::uint8_t* scale_bytes = args.tile + parts.key_scales + fragment * kScaleBytes +
                                      16 * (dim % 64 / kCount) + lanes.rank;
    const VecU scale_codes = load_rank_bytes(scale_bytes, column_blocks * kScaleBytes);
    corrupt += hn::CountTrue(df, hn::And(corrupt_lanes<kMx>(scale_codes), valid));
    const VecF scale = hn::Mul(decode_scale_lanes<kMx>(scale_codes), outer);
    const std::uint8_t* codes = args.tile + parts.key_codes + fragment * layout::kFragmentBytes +
                                dim % 64 * 8 + 4 * lanes.rank;
    for (int chunk = 0; chunk < kCount / 8; ++chunk) {
      VecF values[8];
      decode_eight(load_rank_words(codes + 64 * chunk, column_blocks * layout::kFragmentBytes),
                   values);
      float* HWY_RESTRICT to = x + std::int64_t{dim + 8 * chunk} * kBlockLanes;
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        hn::StoreU(hn::Mul(values[i], scale), df, to + i * kBlockLanes);
      }
    }
  }
  return static_cast<int>(corrupt);
}

template <bool kMx>
inline int dequantize_keys(const DequantizeArgs& args) {
  const LaneF df;
  const int block = hadamard_block(args.head_dim);
  const VecF rotation_scale = hn::Set(df, hadamard_scale(block));
  alignas(64) float x[kMaxTileDims * kBlockLanes];
  int corrupt = 0;
  for (int token = 0; token < kTileTokens; token += kBlockLanes) {
    const auto valid = lanes_below(token, args.valid_tokens);
    corrupt += decode_keys<kMx>(args, token, valid, x);
    for (int base = 0; base < args.head_dim && args.hadamard; base += block) {
      hadamard_vectors(x + std::int64_t{base} * kBlockLanes, block, rotation_scale);
    }
    for (int dim = 0; dim < args.head_dim; ++dim) {
      VecF v = hn::LoadU(df, x + std::int64_t{dim} * kBlockLanes);
      if (args.key_shift != nullptr) v = hn::Add(v, hn::Set(df, args.key_shift[dim]));
      hn::StoreU(hn::IfThenElseZero(valid, v), df,
                 args.key + std::int64_t{dim} * kTileTokens + token);
    }
  }
  return corrupt;
}

template <bool kMx>
inline int dequantize_values(const DequantizeArgs& args) {
  constexpr Format kFormat = kMx ? Format::kMxfp4 : Format::kNvfp4;
  constexpr int kCount = kMx ? 32 : 16;
  const LaneF df;
  const layout::TileParts parts = layout::tile_parts(kFormat, args.head_dim);
  const VecF outer = hn::Set(df, args.value_outer);
  std::size_t corrupt = 0;
  for (int token = 0; token < args.valid_tokens; token += kCount) {
    for (int dim = 0; dim < args.head_dim; dim += kBlockLanes) {
      const std::int64_t fragment = dim / 16;
      const std::uint8_t* scale_bytes = args.tile + parts.value_scales +
                                        fragment * layout::fragment_scale_bytes(kFormat) +
                                        16 * (token / kCount) + dim % 16;
      const VecU scale_codes = hn::PromoteTo(LaneU(), hn::LoadU(LaneU8(), scale_bytes));
      corrupt += hn::CountTrue(df, corrupt_lanes<kMx>(scale_codes));
      const VecF scale = hn::Mul(decode_scale_lanes<kMx>(scale_codes), outer);
      const std::uint8_t* codes = args.tile + parts.value_codes +
                                  fragment * layout::kFragmentBytes + token * 8 + dim % 16 * 4;
      for (int chunk = 0; chunk < kCount / 8; ++chunk) {
        VecF values[8];
        decode_eight(hn::BitCast(LaneU(), hn::LoadU(LaneBytes(), codes + 64 * chunk)), values);
        float* HWY_RESTRICT to = args.value + std::int64_t{token + 8 * chunk} * args.head_dim + dim;
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          hn::StoreU(hn::Mul(values[i], scale), df, to + std::int64_t{i} * args.head_dim);
        }
      }
    }
  }
  return static_cast<int>(corrupt);
}

// ---- row formats -------------------------------------------------------------------------------

// Codes of kNvfp4Rows (low nibble first) to BF16, 32 at a time.
HWY_INLINE void decode_row_codes(const std::uint8_t* HWY_RESTRICT codes, int n,
                                 std::uint16_t* HWY_RESTRICT out) {
  const hn::Full128<std::uint8_t> d;
  const auto nibbles = hn::Set(d, 0x0F);
  const auto high_table = hn::Load(d, kE2m1HighByte);
  const auto low_table = hn::Load(d, kE2m1LowByte);
  const hn::Repartition<std::uint16_t, decltype(d)> d16;
  for (int i = 0; i < n; i += 32) {
    const auto raw = hn::LoadU(d, codes + i / 2);
    const auto even = hn::And(raw, nibbles);
    const auto odd = hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, raw)));
    const auto odd_codes = hn::And(odd, nibbles);
    const decltype(even) ordered[2] = {hn::InterleaveLower(d, even, odd_codes),
                                       hn::InterleaveUpper(d, even, odd_codes)};
    for (int half = 0; half < 2; ++half) {
      const auto high = hn::TableLookupBytes(high_table, ordered[half]);
      const auto low = hn::TableLookupBytes(low_table, ordered[half]);
      hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d, low, high)), d16, out + i + 16 * half);
      hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d, low, high)), d16, out + i + 16 * half + 8);
    }
  }
}

HWY_INLINE VecF load_bf16_lanes(const std::uint16_t* HWY_RESTRICT p) {
  return as_float(hn::ShiftLeft<16>(hn::PromoteTo(LaneU(), hn::LoadU(LaneU16(), p))));
}

// One row of one side (0 is K, 1 is V) to floats. Returns its corrupt scale bytes.
inline int decode_row(const DequantizeArgs& args, int side, int token, float* HWY_RESTRICT out) {
  const LaneF df;
  const std::uint8_t* row =
      args.tile + layout::row_element(args.format, args.head_dim, side, token, 0);
  if (args.format == Format::kFp8E4m3) {
    for (int k = 0; k < args.head_dim; k += kBlockLanes) {
      const VecU code = hn::PromoteTo(LaneU(), hn::LoadU(LaneU8(), row + k));
      hn::StoreU(decode_e4m3_lanes(code), df, out + k);
    }
    return 0;
  }
  alignas(32) std::uint16_t bf16[kMaxTileDims];
  if (args.format == Format::kBf16) {
    std::memcpy(bf16, row, 2 * static_cast<std::size_t>(args.head_dim));
    for (int k = 0; k < args.head_dim; k += kBlockLanes) {
      hn::StoreU(load_bf16_lanes(bf16 + k), df, out + k);
    }
    return 0;
  }
  decode_row_codes(row, args.head_dim, bf16);
  const float outer = side == 0 ? args.key_outer : args.value_outer;
  const std::uint8_t* scales =
      args.tile + layout::row_scale(args.format, args.head_dim, side, token, 0);
  int corrupt = 0;
  for (int k = 0; k < args.head_dim; k += 16) {
    const std::uint8_t code = scales[k / 16];
    corrupt += is_nan_e4m3(code) ? 1 : 0;
    const VecF scale = hn::Set(df, decode_e4m3(code) * outer);
    for (int i = k; i < k + 16; i += kBlockLanes) {
      hn::StoreU(hn::Mul(load_bf16_lanes(bf16 + i), scale), df, out + i);
    }
  }
  return corrupt;
}

inline int dequantize_rows(const DequantizeArgs& args) {
  alignas(64) float rows[kBlockLanes * kMaxTileDims];
  int corrupt = 0;
  for (int token = 0; token < kTileTokens; token += kBlockLanes) {
    for (int i = 0; i < kBlockLanes; ++i) {
      float* HWY_RESTRICT row = rows + std::int64_t{i} * args.head_dim;
      if (token + i < args.valid_tokens) {
        corrupt += decode_row(args, 0, token + i, row);
        corrupt +=
            decode_row(args, 1, token + i, args.value + std::int64_t{token + i} * args.head_dim);
      } else {
        std::memset(row, 0, sizeof(float) * static_cast<std::size_t>(args.head_dim));
      }
    }
    for (int dim = 0; dim < args.head_dim; dim += kBlockLanes) {
      transpose_square(rows + dim, args.head_dim,
                       args.key + std::int64_t{dim} * kTileTokens + token, kTileTokens);
    }
  }
  return corrupt;
}

inline int dequantize_tile(const DequantizeArgs& args) {
  DequantizeArgs clamped = args;
  clamped.valid_tokens = std::clamp(args.valid_tokens, 0, kTileTokens);
  int corrupt = 0;
  switch (args.format) {
    case Format::kNvfp4:
      corrupt = dequantize_keys<false>(clamped) + dequantize_values<false>(clamped);
      break;
    case Format::kMxfp4:
      corrupt = dequantize_keys<true>(clamped) + dequantize_values<true>(clamped);
      break;
    case Format::kBf16:
    case Format::kFp8E4m3:
    case Format::kNvfp4Rows:
      corrupt = dequantize_rows(clamped);
      break;
  }
  const auto valid = static_cast<std::int64_t>(clamped.valid_tokens);
  std::memset(args.value + valid * args.head_dim, 0,
              sizeof(float) * static_cast<std::size_t>((kTileTokens - valid) * args.head_dim));
  return corrupt;
}

inline const DequantizeKernels* get_dequantize_kernels() {
  static constexpr DequantizeKernels kKernels = {dequantize_tile};
  return &kKernels;
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
