// SPDX-License-Identifier: Apache-2.0
// Rows of K and V become one group of one head, per-target. K of tiled pages and both sides of
// kNvfp4Rows are a run of blocks along head_dim: kBlockLanes of them are transposed so that each
// has a lane. V of tiled pages has its blocks along tokens, so its channels are lanes as they come.
#if defined(BITDECODING_CPU_WRITE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_WRITE_INL_H_
#undef BITDECODING_CPU_WRITE_INL_H_
#else
#define BITDECODING_CPU_WRITE_INL_H_
#endif

#include <cstring>

#include "backend/cpu/block_codes-inl.h"
#include "backend/cpu/write_kernels.h"
#include "backend/tensor.h"
#include "page/address.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

inline constexpr int kMaxGroupRows = 32;
inline constexpr int kMaxRowDims = 256;
// Below this magnitude no sum of a row's values reaches float's maximum, so the rotation gives
// neither infinity nor NaN (256 * 2^118 = 2^126).
inline constexpr float kSafeMagnitude = 0x1p118F;

struct GroupJob {
  const WriteParams& params;
  const GroupWrite& write;
  int head;
  std::uint8_t* bytes;
  WriteCounters* tally;

  const LayerConfig& layer() const { return *params.layer; }
  const PageGeometry& geometry() const { return params.layer->geometry; }
  const TensorView& tensor(Side side) const {
    return side == Side::kKey ? params.key : params.value;
  }
  ScaleRule rule(Side side) const {
    return side == Side::kKey ? layer().key_rule : layer().value_rule;
  }
  float outer(Side side) const {
    return outer_scale(side == Side::kKey ? layer().key_outer : layer().value_outer, head);
  }
  int first_page_row() const { return write.group * geometry().group_tokens; }
  std::uint16_t* slot_row(Side side, int row) const {
    return params.shadow.rows +
           shadow_row_index(layer(), write.slot, head, static_cast<int>(side), row);
  }
};

// ---- rows in -----------------------------------------------------------------------------------

template <DType kType>
HWY_INLINE VecU load_bits(const void* HWY_RESTRICT data, std::int64_t i) {
  if constexpr (kType == DType::kF32) {
    return as_bits(hn::LoadU(LaneF(), static_cast<const float*>(data) + i));
  } else {
    const VecU half =
        hn::PromoteTo(LaneU(), hn::LoadU(LaneU16(), static_cast<const std::uint16_t*>(data) + i));
    return kType == DType::kBf16 ? hn::ShiftLeft<16>(half) : as_bits(decode_f16_lanes(half));
  }
}

// storable() of n elements from `i` on.
template <DType kType>
HWY_INLINE void load_storable(const void* HWY_RESTRICT data, std::int64_t i, int n,
                              float* HWY_RESTRICT out, std::uint64_t* non_finite) {
  // Magnitudes from here on round to infinity, or are infinity or NaN.
  constexpr std::uint32_t kOverflow = 0x7F7F8000U;
  const LaneF df;
  const LaneU du;
  for (int k = 0; k < n; k += kBlockLanes) {
    const VecU bits = load_bits<kType>(data, i + k);
    const auto finite = below(hn::And(bits, hn::Set(du, 0x7FFFFFFFU)), kOverflow);
    VecU rounded = bits;
    if constexpr (kType != DType::kBf16) {
      const VecU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
      rounded =
          hn::And(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFU)), odd), hn::Set(du, 0xFFFF0000U));
    }
    hn::StoreU(hn::IfThenElseZero(finite, as_float(rounded)), df, out + k);
    if (HWY_UNLIKELY(!hn::AllTrue(df, finite))) {
      *non_finite += static_cast<std::uint64_t>(kBlockLanes) - hn::CountTrue(df, finite);
    }
  }
}

inline void load_row(const GroupJob& job, Side side, int row, float* HWY_RESTRICT out,
                     std::uint64_t* non_finite) {
  const TensorView& t = job.tensor(side);
  const std::int64_t token = job.write.source + row - job.write.first_row;
  const std::int64_t i = token * t.stride_token + job.head * t.stride_head;
  const int n = job.geometry().head_dim;
  switch (t.dtype) {
    case DType::kF32:
      return load_storable<DType::kF32>(t.data, i, n, out, non_finite);
    case DType::kBf16:
      return load_storable<DType::kBf16>(t.data, i, n, out, non_finite);
    case DType::kF16:
      return load_storable<DType::kF16>(t.data, i, n, out, non_finite);
  }
}

// BF16 of values that are BF16 already.
HWY_INLINE void store_bf16(const float* HWY_RESTRICT x, int n, std::uint16_t* HWY_RESTRICT out) {
  for (int k = 0; k < n; k += kBlockLanes) {
    const VecU bits = hn::ShiftRight<16>(as_bits(hn::LoadU(LaneF(), x + k)));
    hn::StoreU(hn::TruncateTo(LaneU16(), bits), LaneU16(), out + k);
  }
}

// Rows that are written now, [num_rows][head_dim]; their BF16 copies go to the slot.
inline void load_rows(const GroupJob& job, Side side, float* HWY_RESTRICT rows) {
  const int head_dim = job.geometry().head_dim;
  for (int i = 0; i < job.write.num_rows; ++i) {
    const int row = job.write.first_row + i;
    float* HWY_RESTRICT x = rows + std::int64_t{i} * head_dim;
    load_row(job, side, row, x, &job.tally->non_finite);
    if (job.write.slot >= 0) store_bf16(x, head_dim, job.slot_row(side, row));
  }
}

// ---- blocks along head_dim ---------------------------------------------------------------------

// Places the codes and the scale of block `block` of a page row.
template <bool kMx, bool kRows>
HWY_INLINE void place_block(const GroupJob& job, Side side, int page_row, int block,
                            const std::uint32_t* HWY_RESTRICT words, std::int64_t stride_words,
                            std::uint8_t scale) {
  constexpr int kCount = kMx ? 32 : 16;
  constexpr std::int64_t kWordStep = kRows ? 4 : 64;  // bytes from eight codes to the next eight
  const PageGeometry& g = job.geometry();
  const int dim = block * kCount;
  std::uint8_t* at = job.bytes + code_address(g, side, page_row, dim).byte;
  for (int chunk = 0; chunk < kCount / 8; ++chunk) {
    std::memcpy(at + chunk * kWordStep, words + chunk * stride_words, 4);
  }
  job.bytes[scale_address(g, side, page_row, dim)] = scale;
}

// rows: [num_rows][head_dim], followed by kBlockLanes blocks of zeros.
template <bool kMx, bool kRows>
inline void store_blocked_rows(const GroupJob& job, Side side, const float* HWY_RESTRICT rows) {
  constexpr int kCount = kMx ? 32 : 16;
  const int row_blocks = job.geometry().head_dim / kCount;
  const int blocks = job.write.num_rows * row_blocks;
  const int first = job.first_page_row() + job.write.first_row;
  const float outer = job.outer(side);
  alignas(32) float x[kCount * kBlockLanes];
  alignas(32) std::uint32_t words[kCount / 8 * kBlockLanes];
  alignas(32) std::uint8_t scales[kBlockLanes];
  int row = 0;
  int block = 0;
  for (int b = 0; b < blocks; b += kBlockLanes) {
    for (int i = 0; i < kCount; i += kBlockLanes) {
      transpose_square(rows + std::int64_t{b} * kCount + i, kCount, x + i * kBlockLanes,
                       kBlockLanes);
    }
    quantize_lanes<kMx, kRows>(job.rule(side), outer, x, kBlockLanes,
                               reinterpret_cast<std::uint8_t*>(words), 4 * kBlockLanes, scales,
                               job.tally);
    for (int lane = 0; lane < kBlockLanes && b + lane < blocks; ++lane) {
      place_block<kMx, kRows>(job, side, first + row, block, words + lane, kBlockLanes,
                              scales[lane]);
      if (++block == row_blocks) {
        block = 0;
        ++row;
      }
    }
  }
}

// K columns past head_dim: code 0 and scale 0.
inline void clear_padding(const GroupJob& job) {
  const PageGeometry& g = job.geometry();
  const int block = scale_block(g.format);
  for (int dim = g.head_dim; dim < padded_key_dims(g); dim += 8) {
    for (int i = 0; i < job.write.num_rows; ++i) {
      const int page_row = job.first_page_row() + job.write.first_row + i;
      std::memset(job.bytes + code_address(g, Side::kKey, page_row, dim).byte, 0, 4);
      if (dim % block == 0) job.bytes[scale_address(g, Side::kKey, page_row, dim)] = 0;
    }
  }
}

// Keys so large that the rotation may overflow: the rules' own scalar code, whose treatment of
// infinity and NaN is the contract.
inline void store_large_key(const GroupJob& job, int row) {
  const PageGeometry& g = job.geometry();
  const int n = scale_block(g.format);
  const int page_row = job.first_page_row() + row;
  const float outer = job.outer(Side::kKey);
  float x[kMaxRowDims];
  std::uint8_t codes[kMaxScaleBlock];
  std::uint64_t counted_before = 0;
  load_row(job, Side::kKey, row, x, &counted_before);
  for (int dim = 0; dim < g.head_dim && job.layer().key_shift != nullptr; ++dim) {
    x[dim] = x[dim] - job.layer().key_shift[std::int64_t{job.head} * g.head_dim + dim];
  }
  if (job.layer().hadamard) hadamard(x, g.head_dim);
  for (int base = 0; base < g.head_dim; base += n) {
    const std::uint8_t scale = choose_scale(job.rule(Side::kKey), x + base, n, outer);
    encode_block(x + base, n, decode_scale(g.format, scale) * outer, codes);
    const bool flushed = block_amax(x + base, n) > 0.0F && decode_scale(g.format, scale) == 0.0F;
    if (block_saturates(g.format, x + base, n, outer)) ++job.tally->saturated_blocks;
    if (flushed) ++job.tally->flushed_blocks;
    job.bytes[scale_address(g, Side::kKey, page_row, base)] = scale;
    for (int i = 0; i < n; ++i) {
      set_nibble(job.bytes, code_address(g, Side::kKey, page_row, base + i), codes[i]);
    }
  }
}

// Subtracts the shift and rotates one row in place. False when a value is too large for the vector
// path; the row is zero then.
inline bool shift_and_rotate(const GroupJob& job, float* HWY_RESTRICT x) {
  const LaneF df;
  const int head_dim = job.geometry().head_dim;
  const float* shift = job.layer().key_shift == nullptr
                           ? nullptr
                           : job.layer().key_shift + std::int64_t{job.head} * head_dim;
  const VecF limit = hn::Set(df, kSafeMagnitude);
  auto safe = hn::Eq(limit, limit);
  for (int k = 0; k < head_dim; k += kBlockLanes) {
    VecF v = hn::LoadU(df, x + k);
    if (shift != nullptr) v = hn::Sub(v, hn::LoadU(df, shift + k));
    safe = hn::And(safe, hn::Lt(hn::Abs(v), limit));
    hn::StoreU(v, df, x + k);
  }
  if (HWY_UNLIKELY(!hn::AllTrue(df, safe))) {
    std::memset(x, 0, sizeof(float) * static_cast<std::size_t>(head_dim));
    return false;
  }
  if (job.layer().hadamard) hadamard_row(x, head_dim);
  return true;
}

template <bool kMx>
inline void store_tiled_keys(const GroupJob& job, float* HWY_RESTRICT rows) {
  std::uint32_t large = 0;
  for (int i = 0; i < job.write.num_rows; ++i) {
    const bool safe = shift_and_rotate(job, rows + std::int64_t{i} * job.geometry().head_dim);
    large |= safe ? 0U : 1U << i;
  }
  store_blocked_rows<kMx, false>(job, Side::kKey, rows);
  for (int i = 0; large != 0; ++i, large >>= 1) {
    if ((large & 1U) != 0) store_large_key(job, job.write.first_row + i);
  }
  clear_padding(job);
}

// ---- V of tiled pages --------------------------------------------------------------------------

// Subtracts the value means from `count` rows.
inline void centre_values(const GroupJob& job, int count, float* HWY_RESTRICT rows) {
  if (job.layer().value_shift == nullptr) return;
  const LaneF df;
  const int head_dim = job.geometry().head_dim;
  const float* HWY_RESTRICT shift = job.layer().value_shift + std::int64_t{job.head} * head_dim;
  for (int row = 0; row < count; ++row) {
    float* HWY_RESTRICT x = rows + std::int64_t{row} * head_dim;
    for (int k = 0; k < head_dim; k += kBlockLanes) {
      hn::StoreU(hn::Sub(hn::LoadU(df, x + k), hn::LoadU(df, shift + k)), df, x + k);
    }
  }
}

// Rows before first_row as pages hold them: from the slot, else from the page's own codes.
inline void load_value_prefix(const GroupJob& job, float* HWY_RESTRICT rows) {
  const PageGeometry& g = job.geometry();
  for (int row = 0; row < job.write.first_row; ++row) {
    float* HWY_RESTRICT x = rows + std::int64_t{row} * g.head_dim;
    if (job.write.prefix_in_slot) {
      load_storable<DType::kBf16>(job.slot_row(Side::kValue, row), 0, g.head_dim, x,
                                  &job.tally->non_finite);
      centre_values(job, 1, x);
      continue;
    }
    std::uint64_t corrupt = 0;
    for (int dim = 0; dim < g.head_dim; ++dim) {
      x[dim] = storable(read_element(g, job.bytes, Side::kValue, job.first_page_row() + row, dim,
                                     job.outer(Side::kValue), &corrupt),
                        &job.tally->non_finite);
    }
  }
}

// rows: [group_tokens][head_dim], complete.
template <bool kMx>
inline void store_tiled_values(const GroupJob& job, const float* HWY_RESTRICT rows) {
  const PageGeometry& g = job.geometry();
  const float outer = job.outer(Side::kValue);
  for (int dim = 0; dim < g.head_dim; dim += kBlockLanes) {
    quantize_lanes<kMx, false>(
        job.rule(Side::kValue), outer, rows + dim, g.head_dim,
        job.bytes + code_address(g, Side::kValue, job.first_page_row(), dim).byte, 64,
        job.bytes + scale_address(g, Side::kValue, job.first_page_row(), dim), job.tally);
  }
}

// ---- formats without scales --------------------------------------------------------------------

inline void store_plain_rows(const GroupJob& job, Side side, const float* HWY_RESTRICT rows) {
  const PageGeometry& g = job.geometry();
  const LaneF df;
  for (int i = 0; i < job.write.num_rows; ++i) {
    const float* HWY_RESTRICT x = rows + std::int64_t{i} * g.head_dim;
    const int page_row = job.first_page_row() + job.write.first_row + i;
    std::uint8_t* at = job.bytes + element_address(g, side, page_row, 0);
    if (g.format == Format::kBf16) {
      for (int k = 0; k < g.head_dim; k += kBlockLanes) {
        const VecU bits = hn::ShiftRight<16>(as_bits(hn::LoadU(df, x + k)));
        const auto half = hn::TruncateTo(LaneU16(), bits);
        std::memcpy(at + 2 * k, &half, 2 * kBlockLanes);
      }
      continue;
    }
    VecF amax = hn::Zero(df);
    for (int k = 0; k < g.head_dim; k += kBlockLanes) {
      const VecF v = hn::LoadU(df, x + k);
      amax = hn::Max(hn::Abs(v), amax);
      hn::StoreU(hn::TruncateTo(LaneU8(), encode_e4m3_lanes(v)), LaneU8(), at + k);
    }
    // A row counts as one block.
    if (!hn::AllFalse(df, hn::Gt(amax, hn::Set(df, kE4m3Max)))) ++job.tally->saturated_blocks;
  }
}

// ---- one group ---------------------------------------------------------------------------------

template <bool kMx>
inline void write_tiled(const GroupJob& job, float* HWY_RESTRICT rows) {
  const PageGeometry& g = job.geometry();
  const auto row_bytes = sizeof(float) * static_cast<std::size_t>(g.head_dim);
  store_tiled_keys<kMx>(job, rows);
  load_value_prefix(job, rows);
  float* HWY_RESTRICT fresh = rows + std::int64_t{job.write.first_row} * g.head_dim;
  load_rows(job, Side::kValue, fresh);
  centre_values(job, job.write.num_rows, fresh);
  const int end = job.write.first_row + job.write.num_rows;
  std::memset(rows + std::int64_t{end} * g.head_dim, 0,
              row_bytes * static_cast<std::size_t>(g.group_tokens - end));
  store_tiled_values<kMx>(job, rows);
}

inline void write_rows(const GroupJob& job, Side side, const float* HWY_RESTRICT rows) {
  if (job.geometry().format == Format::kNvfp4Rows) {
    store_blocked_rows<false, true>(job, side, rows);
  } else {
    store_plain_rows(job, side, rows);
  }
}

inline void write_group(const WriteParams& params, const GroupWrite& write, int head,
                        std::uint8_t* bytes, WriteCounters* tally) {
  const GroupJob job{params, write, head, bytes, tally};
  const PageGeometry& g = job.geometry();
  // A whole group, and the zero blocks that fill the last vector.
  alignas(64) float rows[kMaxGroupRows * kMaxRowDims + kMaxScaleBlock * kBlockLanes];
  load_rows(job, Side::kKey, rows);
  constexpr std::size_t kPadding = std::size_t{kMaxScaleBlock} * kBlockLanes;
  float* end = rows + std::int64_t{write.num_rows} * g.head_dim;
  std::memset(end, 0, sizeof(float) * kPadding);
  if (g.format == Format::kNvfp4) {
    write_tiled<false>(job, rows);
  } else if (g.format == Format::kMxfp4) {
    write_tiled<true>(job, rows);
  } else {
    write_rows(job, Side::kKey, rows);
    load_rows(job, Side::kValue, rows);
    write_rows(job, Side::kValue, rows);
  }
}

inline const WriteKernels* get_write_kernels() {
  static constexpr WriteKernels kKernels = {write_group};
  return &kKernels;
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
