// SPDX-License-Identifier: Apache-2.0
// MatrixKernels on Intel AMX: BF16 products in tile registers, softmax in AVX-512.
#if defined(BITDECODING_AMX)

#include <cstring>
#include <limits>

#include "backend/cpu/amx.h"

namespace bitdecoding::cpu {
namespace {

using amx::round_pair;

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == sizeof(MatrixSaved::config));

// Eight tiles of 16 rows of 64 bytes.
TileConfig full_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  return config;
}

// The compiler does not know that tile instructions read and write memory.
inline void memory_fence_for_tiles() { __asm__ volatile("" ::: "memory"); }

BITDECODING_AMX_FUNCTIONS

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;
constexpr float kLargeScore = 4096.0F;  // floats above it are further apart than 2^-12
constexpr int kLanes = 16;
constexpr int kTokens = kTileTokens;
// Floats from one row of scores to the next: rows of a tile register fall into different cache
// sets.
constexpr int kScoreStride = kMatrixTiles * kTokens + kLanes;

// ---- products ----------------------------------------------------------------------------------

// Sum += A . B for 32 rows and 32 columns: tiles 0..3 hold the sums, 4 and 5 the rows, 6 and 7 the
// columns.
HWY_INLINE void multiply_step(const std::uint16_t* a0, const std::uint16_t* a1,
                              const std::uint16_t* b0, const std::uint16_t* b1) {
  _tile_loadd(4, a0, 64);
  _tile_loadd(6, b0, 64);
  _tile_loadd(7, b1, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, a1, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Which terms meet: high with high, high with low, low with high.
struct TermPair {
  int left, right;
};
constexpr TermPair kTermPairs[3] = {{0, 0}, {1, 0}, {0, 1}};

HWY_INLINE bool has_pair(TermPair pair, int left_terms, int right_terms) {
  return pair.left < left_terms && pair.right < right_terms;
}

// scores[32][kScoreStride] of one tile's 64 tokens.
void tile_scores(const MatrixTile& tile, const MatrixState& state, const std::uint16_t* query,
                 float* scores) {
  const int steps = state.head_dim / 32;
  const std::int64_t next_rows = std::int64_t{state.query_terms} * steps * kMatrixBlock;
  memory_fence_for_tiles();
  for (int half = 0; half < 2; ++half) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (const TermPair pair : kTermPairs) {
      if (!has_pair(pair, state.query_terms, state.key_terms)) continue;
      const std::uint16_t* a = query + std::int64_t{pair.left} * steps * kMatrixBlock;
      const std::uint16_t* b =
          tile.key + (std::int64_t{pair.right} * steps * 4 + 2 * half) * kMatrixBlock;
      for (int step = 0; step < steps; ++step) {
        multiply_step(a, a + next_rows, b, b + kMatrixBlock);
        a += kMatrixBlock;
        b += 4 * kMatrixBlock;
      }
    }
    float* to = scores + 32 * half;
    constexpr int kStrideBytes = kScoreStride * static_cast<int>(sizeof(float));
    _tile_stored(0, to, kStrideBytes);
    _tile_stored(1, to + kLanes, kStrideBytes);
    _tile_stored(2, to + 16 * kScoreStride, kStrideBytes);
    _tile_stored(3, to + 16 * kScoreStride + kLanes, kStrideBytes);
  }
  memory_fence_for_tiles();
}

// Probabilities of 32 rows as the left operand of P . V: [2][terms][2 * kMatrixTiles] blocks.
struct Probabilities {
  alignas(64) std::uint16_t values[std::size_t{2} * 2 * 2 * kMatrixTiles * kMatrixBlock];
  static constexpr std::int64_t kTermValues = std::int64_t{2} * kMatrixTiles * kMatrixBlock;
};

void add_values(const MatrixTile* const* tiles, int count, const MatrixState& state,
                const Probabilities& probabilities, float* out) {
  const int columns = state.head_dim / 16;
  const std::int64_t next_rows = state.probability_terms * Probabilities::kTermValues;
  const std::int64_t stride_bytes = std::int64_t{state.head_dim} * 4;
  memory_fence_for_tiles();
  for (int column = 0; column < columns; column += 2) {
    float* to = out + std::int64_t{16} * column;
    float* below = to + std::int64_t{16} * state.head_dim;
    _tile_loadd(0, to, stride_bytes);
    _tile_loadd(1, to + kLanes, stride_bytes);
    _tile_loadd(2, below, stride_bytes);
    _tile_loadd(3, below + kLanes, stride_bytes);
    for (const TermPair pair : kTermPairs) {
      if (!has_pair(pair, state.probability_terms, state.value_terms)) continue;
      const std::uint16_t* a = probabilities.values + pair.left * Probabilities::kTermValues;
      for (int i = 0; i < count; ++i) {
        const std::uint16_t* b =
            tiles[i]->value + (std::int64_t{pair.right} * 2 * columns + column) * kMatrixBlock;
        for (int step = 0; step < 2; ++step) {
          multiply_step(a, a + next_rows, b, b + kMatrixBlock);
          a += kMatrixBlock;
          b += std::int64_t{columns} * kMatrixBlock;
        }
      }
    }
    _tile_stored(0, to, stride_bytes);
    _tile_stored(1, to + kLanes, stride_bytes);
    _tile_stored(2, below, stride_bytes);
    _tile_stored(3, below + kLanes, stride_bytes);
  }
  memory_fence_for_tiles();
}

// ---- softmax -----------------------------------------------------------------------------------

// 2^t for t <= 0, 0 for -inf. Minimax on [0, 1): relative error 2.6e-06, a thousandth of a BF16
// rounding, or 7.5e-08 (kPrecise).
template <bool kPrecise>
HWY_INLINE __m512 exp2_non_positive(__m512 t) {
  constexpr int kFraction = 0x09;  // t - floor(t); of -inf: 0
  const __m512 f = _mm512_reduce_ps(t, kFraction);
  __m512 p;
  if constexpr (kPrecise) {
    p = _mm512_fmadd_ps(_mm512_set1_ps(1.8775767e-03F), f, _mm512_set1_ps(8.989341e-03F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5826318e-02F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4015361e-01F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931531e-01F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999994e-01F));
  } else {
    p = _mm512_fmadd_ps(_mm512_set1_ps(1.3534168e-02F), f, _mm512_set1_ps(5.201146e-02F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4144275e-01F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9300383e-01F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000026e+00F));
  }
  return _mm512_scalef_ps(p, t);  // times 2^floor(t)
}

HWY_INLINE float exp2_scalar(float t) {
  return _mm512_cvtss_f32(exp2_non_positive<true>(_mm512_set1_ps(t)));
}

// cap * tanh(x / cap), tanh(y) = (1 - e^-2|y|) / (1 + e^-2|y|) with y's sign.
HWY_INLINE __m512 soft_cap(__m512 x, float cap) {
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 scaled = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0F * kLog2E / cap));
  const __m512 e = exp2_non_positive<true>(scaled);
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512 capped = _mm512_mul_ps(t, _mm512_set1_ps(cap));
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(capped), sign));
}

// One row over kTiles tiles: its scores become probabilities relative to the row's new maximum, in
// the left operand's form. Returns the factor of what was summed before.
template <int kTiles, bool kPrecise>
HWY_INLINE float softmax_row(const std::uint64_t* masks, const float* scores,
                             const MatrixState& state, int row, std::uint16_t* probabilities) {
  constexpr int kVectors = 4 * kTiles;
  __m512 x[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) x[i] = _mm512_loadu_ps(scores + kLanes * i);
  float scale = state.scale[row];
  float offset = state.offset[row];
  if (state.softcap != 0.0F) {
    for (int i = 0; i < kVectors; ++i) {
      x[i] = soft_cap(_mm512_fmadd_ps(x[i], _mm512_set1_ps(scale), _mm512_set1_ps(offset)),
                      state.softcap);
    }
    scale = 1.0F;
    offset = 0.0F;
  }
  std::uint64_t all = ~std::uint64_t{0};
  for (int tile = 0; tile < kTiles; ++tile) all &= masks[tile];
  if (all != ~std::uint64_t{0}) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const auto seen = static_cast<__mmask16>(masks[i / 4] >> (kLanes * (i % 4)));
      x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), seen, x[i]);
    }
  }
  __m512 top[4] = {x[0], x[1], x[2], x[3]};
#pragma GCC unroll 16
  for (int i = 4; i < kVectors; ++i) top[i % 4] = _mm512_max_ps(top[i % 4], x[i]);
  // In powers of two from here on; the scale is positive, so the largest stays the largest.
  scale *= kLog2E;
  offset *= kLog2E;
  const float largest = _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
  const float tile_max = largest * scale + offset;
  const float old_max = state.max[row] * kLog2E;
  const float new_max = old_max > tile_max ? old_max : tile_max;
  if (!(new_max > -kInfinity)) {  // nothing seen yet
    for (int i = 0; i < kTiles * 2; ++i) {
      _mm512_storeu_si512(probabilities + i * kMatrixBlock, _mm512_setzero_si512());
      if constexpr (kPrecise) {
        _mm512_storeu_si512(probabilities + i * kMatrixBlock + Probabilities::kTermValues,
                            _mm512_setzero_si512());
      }
    }
    return 1.0F;
  }
  const __m512 factor = _mm512_set1_ps(scale);
  float constant = offset - new_max;
  // The fused product below keeps what the maximum's rounding lost: with scores this large the
  // largest would lie some powers of two beside its own maximum. Relative to it, it is exactly 0.
  if (__builtin_fabsf(new_max) > kLargeScore && largest > -kInfinity) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) x[i] = _mm512_sub_ps(x[i], _mm512_set1_ps(largest));
    constant = tile_max - new_max;
  }
  const __m512 shift = _mm512_set1_ps(constant);
  __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; i += 2) {
    __m512 a = exp2_non_positive<kPrecise>(_mm512_fmadd_ps(x[i], factor, shift));
    __m512 b = exp2_non_positive<kPrecise>(_mm512_fmadd_ps(x[i + 1], factor, shift));
    total[0] = _mm512_add_ps(total[0], a);
    total[1] = _mm512_add_ps(total[1], b);
    std::uint16_t* to = probabilities + i / 2 * kMatrixBlock;
    if constexpr (kPrecise) {
      _mm512_storeu_si512(to, round_pair(&a, &b));
      _mm512_storeu_si512(to + Probabilities::kTermValues, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    } else {
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
  }
  const float keep = tile_max > old_max ? exp2_scalar(old_max - new_max) : 1.0F;
  state.sum[row] = state.sum[row] * keep + _mm512_reduce_add_ps(_mm512_add_ps(total[0], total[1]));
  if (tile_max > old_max) state.max[row] = new_max * kLn2;
  return keep;
}

template <int kTiles>
void softmax_rows(const MatrixTile* const* tiles, const float* scores, const MatrixState& state,
                  int first_row, Probabilities* probabilities, float* keep) {
  for (int r = 0; r < kMatrixRows; ++r) {
    const int row = first_row + r;
    std::uint64_t masks[kTiles];
    for (int i = 0; i < kTiles; ++i) masks[i] = tiles[i]->mask[row];
    std::uint16_t* to = probabilities->values +
                        r / 16 * state.probability_terms * Probabilities::kTermValues + r % 16 * 32;
    keep[r] = state.probability_terms == 1
                  ? softmax_row<kTiles, false>(masks, scores + r * kScoreStride, state, row, to)
                  : softmax_row<kTiles, true>(masks, scores + r * kScoreStride, state, row, to);
  }
}

HWY_INLINE void scale_row(float* out, int head_dim, float keep) {
  const __m512 factor = _mm512_set1_ps(keep);
  for (int d = 0; d < head_dim; d += kLanes) {
    _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), factor));
  }
}

void attend(const MatrixTile* tiles, int count, const MatrixState& state) {
  using SoftmaxRows = void (*)(const MatrixTile* const*, const float*, const MatrixState&, int,
                               Probabilities*, float*);
  static constexpr SoftmaxRows kSoftmax[kMatrixTiles] = {softmax_rows<1>, softmax_rows<2>,
                                                         softmax_rows<3>, softmax_rows<4>};
  alignas(64) float scores[kMatrixRows * kScoreStride];
  Probabilities probabilities;
  float keep[kMatrixRows];
  const std::int64_t query_row = std::int64_t{state.query_terms} * state.head_dim;
  for (int row = 0; row < state.rows; row += kMatrixRows) {
    const MatrixTile* seen[kMatrixTiles];
    int num_seen = 0;
    for (int i = 0; i < count; ++i) {
      std::uint64_t any = 0;
      for (int r = 0; r < kMatrixRows; ++r) any |= tiles[i].mask[row + r];
      if (any != 0) seen[num_seen++] = tiles + i;
    }
    if (num_seen == 0) continue;
    for (int i = 0; i < num_seen; ++i) {
      tile_scores(*seen[i], state, state.query + row * query_row, scores + kTokens * i);
    }
    kSoftmax[num_seen - 1](seen, scores, state, row, &probabilities, keep);
    float* out = state.out + std::int64_t{row} * state.head_dim;
    for (int r = 0; r < kMatrixRows; ++r) {
      if (keep[r] != 1.0F)
        scale_row(out + std::int64_t{r} * state.head_dim, state.head_dim, keep[r]);
    }
    add_values(seen, num_seen, state, probabilities, out);
  }
}

// ---- the unit ----------------------------------------------------------------------------------

// Results below 2^-126 are 0: they take hundreds of clocks otherwise. Operands below it count, as
// E4M3 scales on their way to floats are such.
constexpr unsigned kFlushResults = 0x8000;
constexpr unsigned kFlushOperands = 0x0040;

void begin(MatrixSaved* saved) {
  const TileConfig config = full_tiles();
  saved->control = _mm_getcsr();
  _mm_setcsr((saved->control | kFlushResults) & ~kFlushOperands);
  memory_fence_for_tiles();
  _tile_storeconfig(saved->config);
  _tile_loadconfig(&config);
  memory_fence_for_tiles();
}

void end(MatrixSaved* saved) {
  memory_fence_for_tiles();
  if (saved->config[0] == 0) {
    _tile_release();
  } else {
    _tile_loadconfig(saved->config);
  }
  _mm_setcsr(saved->control);
}

HWY_POP_ATTRIBUTES

}  // namespace

const MatrixKernels* amx_kernels() {
  static constexpr MatrixKernels kKernels = {
      attend, amx::pack_query, amx::pack_right, amx::unpack_tile, amx::rotate, begin, end};
  return &kKernels;
}

}  // namespace bitdecoding::cpu

#endif
