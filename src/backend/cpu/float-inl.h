// SPDX-License-Identifier: Apache-2.0
// Float attention over one tile, per-target.
#if defined(BITDECODING_CPU_FLOAT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITDECODING_CPU_FLOAT_INL_H_
#undef BITDECODING_CPU_FLOAT_INL_H_
#else
#define BITDECODING_CPU_FLOAT_INL_H_
#endif

#include <limits>

#include "backend/cpu/float_kernels.h"
#include "backend/cpu/lanes-inl.h"
#include "backend/cpu/ops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace bitdecoding::cpu::HWY_NAMESPACE {

// out[m][n] (+)= a[m][k] * b[k][n] for R rows, n in two vectors from `column`. Each output is one
// chain of FMAs over k, so it does not depend on R.
template <int R>
HWY_INLINE void multiply_panel(const float* HWY_RESTRICT a, std::int64_t stride_a,
                               const float* HWY_RESTRICT b, std::int64_t stride_b, int depth,
                               VF (&acc)[R][2]) {
  const DF df;
  for (int k = 0; k < depth; ++k) {
    const VF b0 = hn::LoadU(df, b + k * stride_b);
    const VF b1 = hn::LoadU(df, b + k * stride_b + kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const VF x = hn::Set(df, a[r * stride_a + k]);
      acc[r][0] = hn::MulAdd(x, b0, acc[r][0]);
      acc[r][1] = hn::MulAdd(x, b1, acc[r][1]);
    }
  }
}

template <int R>
HWY_INLINE void score_rows(const FloatState& state, const float* HWY_RESTRICT key, int row,
                           float* HWY_RESTRICT scores, std::int64_t stride) {
  const DF df;
  for (int column = 0; column < 64; column += 2 * kLanes) {
    VF acc[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const VF offset = hn::Set(df, state.offset == nullptr ? 0.0F : state.offset[row + r]);
      acc[r][0] = offset;
      acc[r][1] = offset;
    }
    multiply_panel<R>(state.query + std::int64_t{row} * state.head_dim, state.head_dim,
                      key + column, 64, state.head_dim, acc);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      hn::StoreU(acc[r][0], df, scores + r * stride + column);
      hn::StoreU(acc[r][1], df, scores + r * stride + column + kLanes);
    }
  }
}

template <int R>
HWY_INLINE void value_rows(const FloatState& state, const float* HWY_RESTRICT value, int row,
                           const float* HWY_RESTRICT probabilities, std::int64_t stride,
                           const float* HWY_RESTRICT keep) {
  const DF df;
  for (int dim = 0; dim < state.head_dim; dim += 2 * kLanes) {
    float* HWY_RESTRICT out = state.out + std::int64_t{row} * state.head_dim + dim;
    VF acc[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const VF k = hn::Set(df, keep == nullptr ? 1.0F : keep[r]);
      acc[r][0] = hn::Mul(hn::LoadU(df, out + r * state.head_dim), k);
      acc[r][1] = hn::Mul(hn::LoadU(df, out + r * state.head_dim + kLanes), k);
    }
    multiply_panel<R>(probabilities, stride, value + dim, state.head_dim, 64, acc);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      hn::StoreU(acc[r][0], df, out + r * state.head_dim);
      hn::StoreU(acc[r][1], df, out + r * state.head_dim + kLanes);
    }
  }
}

// Calls function<R>(row, R rows) in blocks of four, then the rest.
template <class Function4, class Function3, class Function2, class Function1>
HWY_INLINE void for_row_blocks(int rows, Function4 f4, Function3 f3, Function2 f2, Function1 f1) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) f4(row);
  switch (rows - row) {
    case 3:
      f3(row);
      break;
    case 2:
      f2(row);
      break;
    case 1:
      f1(row);
      break;
    default:
      break;
  }
}

inline void float_scores(const FloatTile& tile, const FloatState& state, float* scores,
                         std::int64_t stride) {
  for_row_blocks(
      state.rows, [&](int r) { score_rows<4>(state, tile.key, r, scores + r * stride, stride); },
      [&](int r) { score_rows<3>(state, tile.key, r, scores + r * stride, stride); },
      [&](int r) { score_rows<2>(state, tile.key, r, scores + r * stride, stride); },
      [&](int r) { score_rows<1>(state, tile.key, r, scores + r * stride, stride); });
}

inline void accumulate_values(const FloatTile& tile, const FloatState& state, const float* p,
                              std::int64_t stride, const float* keep) {
  const auto at = [&](int r) { return keep == nullptr ? nullptr : keep + r; };
  for_row_blocks(
      state.rows,
      [&](int r) { value_rows<4>(state, tile.value, r, p + r * stride, stride, at(r)); },
      [&](int r) { value_rows<3>(state, tile.value, r, p + r * stride, stride, at(r)); },
      [&](int r) { value_rows<2>(state, tile.value, r, p + r * stride, stride, at(r)); },
      [&](int r) { value_rows<1>(state, tile.value, r, p + r * stride, stride, at(r)); });
}

inline void float_accumulate(const FloatTile& tile, const FloatState& state,
                             const float* probabilities, std::int64_t stride) {
  accumulate_values(tile, state, probabilities, stride, nullptr);
}

HWY_INLINE float exp_scalar(float x) { return hn::GetLane(exp_non_positive(hn::Set(DF(), x))); }

// Masked online softmax of one row: scores become probabilities relative to the new maximum.
// Returns the factor for what was summed before.
HWY_INLINE float softmax_row(std::uint64_t mask, float* HWY_RESTRICT scores, float* max,
                             float* sum) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const DF df;
  if (mask == 0) {
    for (int i = 0; i < 64; i += kLanes) hn::StoreU(hn::Zero(df), df, scores + i);
    return 1.0F;
  }
  if (mask != ~std::uint64_t{0}) {
    for (int i = 0; i < 64; ++i) {
      if (((mask >> i) & 1U) == 0) scores[i] = -kInfinity;
    }
  }
  VF top = hn::LoadU(df, scores);
  for (int i = kLanes; i < 64; i += kLanes) top = hn::Max(top, hn::LoadU(df, scores + i));
  const float old_max = *max;
  const float tile_max = hn::GetLane(hn::MaxOfLanes(df, top));
  const float new_max = old_max > tile_max ? old_max : tile_max;
  VF total = hn::Zero(df);
  for (int i = 0; i < 64; i += kLanes) {
    const VF p = exp_non_positive(hn::Sub(hn::LoadU(df, scores + i), hn::Set(df, new_max)));
    total = hn::Add(total, p);
    hn::StoreU(p, df, scores + i);
  }
  const float keep = old_max == -kInfinity ? 0.0F : exp_scalar(old_max - new_max);
  *sum = *sum * keep + hn::GetLane(hn::SumOfLanes(df, total));
  *max = new_max;
  return keep;
}

inline void float_tile(const FloatTile& tile, const FloatState& all) {
  alignas(64) float scores[kFloatRows * 64];
  alignas(64) float keep[kFloatRows];
  for (int begin = 0; begin < all.rows; begin += kFloatRows) {
    FloatState state = all;
    state.rows = all.rows - begin < kFloatRows ? all.rows - begin : kFloatRows;
    state.query += std::int64_t{begin} * all.head_dim;
    state.out += std::int64_t{begin} * all.head_dim;
    if (all.offset != nullptr) state.offset += begin;
    std::uint64_t any = 0;
    for (int r = 0; r < state.rows; ++r) any |= tile.mask[begin + r];
    if (any == 0) continue;
    float_scores(tile, state, scores, 64);
    for (int r = 0; r < state.rows; ++r) {
      if (all.softcap != 0.0F) softcap_scores(all.softcap, scores + 64 * r);
      keep[r] = softmax_row(tile.mask[begin + r], scores + 64 * r, all.max + begin + r,
                            all.sum + begin + r);
    }
    accumulate_values(tile, state, scores, 64, keep);
  }
}

inline void bf16_to_float(const std::uint16_t* HWY_RESTRICT in, float* HWY_RESTRICT out, int n) {
  const DU32 du32;
  const DF df;
  const hn::Rebind<std::uint16_t, DF> du16;
  for (int i = 0; i < n; i += kLanes) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, in + i)));
    hn::StoreU(hn::BitCast(df, bits), df, out + i);
  }
}

inline void clean(float* x, int n) {
  const DI32 di32;
  const DF df;
  // Magnitudes that BF16 rounds to infinity, infinity and NaN.
  const VI32 magnitude = hn::Set(di32, 0x7FFFFFFF);
  const VI32 largest = hn::Set(di32, 0x7F7F7FFF);
  for (int i = 0; i < n; i += kLanes) {
    const VF v = hn::LoadU(df, x + i);
    const auto lost = hn::Gt(hn::And(hn::BitCast(di32, v), magnitude), largest);
    hn::StoreU(hn::IfThenZeroElse(hn::RebindMask(df, lost), v), df, x + i);
  }
}

inline void transpose_keys(const float* HWY_RESTRICT rows, int head_dim, float* HWY_RESTRICT key) {
  for (int dim = 0; dim < head_dim; dim += kBlockLanes) {
    for (int token = 0; token < 64; token += kBlockLanes) {
      transpose_square(rows + std::int64_t{token} * head_dim + dim, head_dim,
                       key + std::int64_t{dim} * 64 + token, 64);
    }
  }
}

inline const FloatKernels* get_float_kernels() {
  static constexpr FloatKernels kKernels = {float_tile,    float_scores, float_accumulate,
                                            bf16_to_float, clean,        transpose_keys};
  return &kKernels;
}

}  // namespace bitdecoding::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
