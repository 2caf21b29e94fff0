// SPDX-License-Identifier: Apache-2.0
// One warp's part of a row: scores, probabilities and values of tiles and of BF16 rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/decode_traits.cuh"
#include "common/mma.cuh"
#include "common/unpack.cuh"
#include "common/work_list.cuh"

namespace bitdecoding::cuda {

template <class T>
struct Accumulators {
  float output[T::kColumnBlocks][T::kValueGroups][4];
  float maximum[T::kColumnBlocks][2];
  float sum[T::kColumnBlocks][2];

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < T::kValueGroups; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[n][m][i] = 0.0F;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        maximum[n][j] = kNoMaximum;
        sum[n][j] = 0.0F;
      }
    }
  }

  // Raises the maxima of column block n to at least the lanes' maxima, when one is far above.
  __device__ void raise(int n, float a, float b) {
    const bool far = a > maximum[n][0] + kSlack || b > maximum[n][1] + kSlack;
    if (!__any_sync(0xFFFFFFFFU, far)) return;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      a = fmaxf(a, __shfl_xor_sync(0xFFFFFFFFU, a, step));
      b = fmaxf(b, __shfl_xor_sync(0xFFFFFFFFU, b, step));
    }
    const float top[2] = {fmaxf(a, maximum[n][0]), fmaxf(b, maximum[n][1])};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float alpha = exp2_approx(maximum[n][j] - top[j]);
      maximum[n][j] = top[j];
      sum[n][j] *= alpha;
#pragma unroll
      for (int m = 0; m < T::kValueGroups; ++m) {
        output[n][m][j] *= alpha;
        output[n][m][j + 2] *= alpha;
      }
    }
  }
};

// What a query column sees, and which positions it reads as BF16.
struct ColumnRule {
  std::int32_t first = 0, last = -1;             // visible positions
  std::int32_t sink_end = 0, tail = 0x7FFFFFFF;  // BF16: before sink_end or from tail on
};

template <class T>
class WarpRow {
 public:
  // Asks for the first spans: they arrive while queries are loaded.
  __device__ WarpRow(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row)
      : a_(a), s_(s), row_(row), lane_(threadIdx.x & 31), g_(lane_ >> 2), t_(lane_ & 3) {
    spans_ = a.plan.units + static_cast<std::int64_t>(row.request) * a.plan.unit_stride;
    if (lane_ < row.of.num_units) span_ = {spans_[lane_].begin, spans_[lane_].end};
    acc.clear();
  }

  // After load_queries and a barrier.
  __device__ void begin() {
    find_plain_tiles();
    take_queries();
  }

  // One tile: K at `keys` now, V when `values()` returns.
  template <class Values>
  __device__ void tile(int tile, bool readable, const std::uint8_t* keys, Values values);
  template <class Values>
  __device__ void shadow(int index, const std::uint8_t* keys, Values values);

  Accumulators<T> acc;

 private:
  __device__ void find_plain_tiles() {
    const Request& r = row_.of;
    const int first_query = r.seq_len - r.query_len;
    // Tiles in [plain_begin_, plain_end_) are seen whole by every column and hold no BF16 position.
    plain_begin_ = a_.window_left < 0 ? 0 : max(r.seq_len - 1 - a_.window_left, 0);
    plain_end_ = first_query + 1;
    // Spans in the first quarter of the sequence push the beginning, others the end: tiles between
    // a sink and a tail are what is to be found fast; a tile taken for a border tile costs little.
    const int middle = r.seq_len / 4;
    const auto exclude = [&](std::int32_t begin, std::int32_t end) {
      if (begin < middle) {
        plain_begin_ = max(plain_begin_, end);
      } else {
        plain_end_ = min(plain_end_, begin);
      }
    };
    if (lane_ < r.num_units) exclude(span_.x, span_.y);
    for (int i = 32 + lane_; i < r.num_units; i += 32) exclude(spans_[i].begin, spans_[i].end);
    __syncwarp();
    plain_begin_ = __reduce_max_sync(0xFFFFFFFFU, plain_begin_);
    plain_end_ = __reduce_min_sync(0xFFFFFFFFU, plain_end_);
  }

  __device__ void take_queries() {
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
      for (int step = 0; step < kHeldSteps; ++step) {
        // Padded columns of K hold zeros; the query's are never loaded.
        if (16 * step >= T::kHeadDim) continue;
        query_[n][step] = load_query(n, step);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = kColumns * n + 2 * t_ + j;
        factor_[n][j] = s_.row.factor[column];
        offset_[n][j] = s_.row.offset[column];
      }
    }
  }

  __device__ ColumnRule rule_of(int column) const {
    ColumnRule rule;
    const int q = s_.row.position[column];
    if (q < 0) return rule;
    rule.last = q;
    rule.first = a_.window_left < 0 ? 0 : max(q - a_.window_left, 0);
    if (a_.plan.reproducible != 0) {
      rule.sink_end = a_.plan.sink_tokens;
      rule.tail = tail_begin(a_.plan, q + 1);
    } else {
      rule.tail = 0;  // whatever is in a span
    }
    return rule;
  }
  __device__ static bool is_bf16(const ColumnRule& rule, int position) {
    return position < rule.sink_end || position >= rule.tail;
  }
  // Positions of the tile that lie in a shadow span.
  __device__ std::uint64_t spans_of(int begin) const {
    std::uint64_t mask = 0;
    for (int i = lane_; i < row_.of.num_units; i += 32) {
      const ShadowUnit u = spans_[i];
      const int low = max(u.begin - begin, 0);
      const int high = min(u.end - begin, kTileTokens);
      if (low < high) mask |= (~0ULL >> (64 - (high - low))) << low;
    }
    __syncwarp();
    const std::uint32_t lower = __reduce_or_sync(0xFFFFFFFFU, static_cast<std::uint32_t>(mask));
    const std::uint32_t upper =
        __reduce_or_sync(0xFFFFFFFFU, static_cast<std::uint32_t>(mask >> 32));
    return (static_cast<std::uint64_t>(upper) << 32) | lower;
  }
  __device__ void scores(const std::uint8_t* keys, float (&c)[T::kColumnBlocks][4][4]) const;
  __device__ void to_log2(float (&c)[T::kColumnBlocks][4][4]) const;
  __device__ unsigned mask(int tile, bool readable, float (&c)[T::kColumnBlocks][4][4]) const;
  __device__ float finish_score(float product, float factor, float offset) const {
    const float y = fmaf(product, factor, offset);
    return a_.softcap == 0.0F ? y : a_.softcap * kLog2e * tanh_fast(y);
  }

  // B operand of one MMA step over head_dim.
  __device__ uint2 load_query(int n, int step) const {
    const int dim = 32 * (step >> 1) + 8 * t_ + 4 * (step & 1);
    return *reinterpret_cast<const uint2*>(&s_.row.rotated[kColumns * n + g_][dim]);
  }
  __device__ uint2 query(int n, int step) const {
    if constexpr (kHeldSteps > 0) {
      return query_[n][step];
    } else {
      return load_query(n, step);
    }
  }

  // Of one column block and up to 128 channels queries stay in registers; more would push
  // accumulators out.
  static constexpr int kHeldSteps =
      T::kColumnBlocks == 1 && T::kHeadDim <= 128 ? 4 * T::kKeyBlocks : 0;

  const DecodeArgs& a_;
  SharedStorage<T>& s_;
  const ListRow& row_;
  const ShadowUnit* spans_;
  const int lane_, g_, t_;
  int2 span_ = {0, 0};  // begin and end of the lane's first span
  int plain_begin_, plain_end_;
  uint2 query_[T::kColumnBlocks][kHeldSteps > 0 ? kHeldSteps : 1];
  float factor_[T::kColumnBlocks][2];
  float offset_[T::kColumnBlocks][2];
};

template <class T>
__device__ inline void WarpRow<T>::scores(const std::uint8_t* keys,
                                          float (&c)[T::kColumnBlocks][4][4]) const {
  using S = Scales<T::kFormat>;
  const int scale_at = static_cast<int>(T::kParts.key_scales) + S::word_offset(lane_);
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int group = 0; group < 4; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[n][group][i] = 0.0F;
    }
  }
  // Row groups innermost: neighbouring MMAs add to different accumulators.
#pragma unroll
  for (int block = 0; block < T::kKeyBlocks; ++block) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint4 words[2];
      LaneScales scale[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int fragment = (2 * pair + e) * T::kKeyBlocks + block;
        words[e] =
            *reinterpret_cast<const uint4*>(keys + fragment * layout::kFragmentBytes + 16 * lane_);
        scale[e] = S::decode(*reinterpret_cast<const std::uint32_t*>(
            keys + scale_at + fragment * S::kBytesPerFragment));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (64 * block + 32 * half >= T::kHeadDim) continue;
        std::uint32_t a[2][2][4];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          operand_pair(half == 0 ? words[e].x : words[e].z, half == 0 ? words[e].y : words[e].w,
                       scale[e].of[0][half], scale[e].of[1][half], a[e]);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int n = 0; n < T::kColumnBlocks; ++n) {
            const uint2 q = query(n, 4 * block + 2 * half + step);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              mma_f16(c[n][2 * pair + e], a[e][step][0], a[e][step][1], a[e][step][2],
                      a[e][step][3], q.x, q.y);
            }
          }
        }
      }
    }
  }
}

// Position inside the tile of accumulator i of a row group (layout.h: key_mma_row).
__device__ inline int token_of(int g, int group, int i) {
  return 32 * (group >> 1) + 8 * (g >> 1) + 4 * (group & 1) + 2 * (i >> 1) + (g & 1);
}

template <class T>
__device__ inline void WarpRow<T>::to_log2(float (&c)[T::kColumnBlocks][4][4]) const {
  const auto for_each = [&](auto change) {
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
      for (int group = 0; group < 4; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          c[n][group][i] = change(c[n][group][i], factor_[n][i & 1], offset_[n][i & 1]);
        }
      }
    }
  };
  // One branch for the tile, not one for each score.
  if (a_.softcap == 0.0F) {
    for_each([](float x, float factor, float offset) { return fmaf(x, factor, offset); });
  } else {
    for_each([&](float x, float factor, float offset) {
      return a_.softcap * kLog2e * tanh_fast(fmaf(x, factor, offset));
    });
  }
}

// Unseen scores become -inf. Returns the tile's 16-token groups of which anything is seen: the
// others may hold anything, also NaN.
template <class T>
__device__ inline unsigned WarpRow<T>::mask(int tile, bool readable,
                                            float (&c)[T::kColumnBlocks][4][4]) const {
  const int begin = tile * kTileTokens;
  if (readable && begin >= plain_begin_ && begin + kTileTokens <= plain_end_) return 15U;
  const std::uint64_t spans = spans_of(begin);
  unsigned seen = 0;
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const ColumnRule rule = rule_of(kColumns * n + 2 * t_ + j);
#pragma unroll
      for (int group = 0; group < 4; ++group) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          const int token = token_of(g_, group, 2 * up);
          const int position = begin + token;
          const bool in_span = ((spans >> token) & 1U) != 0 && is_bf16(rule, position);
          const bool sees = readable && position >= rule.first && position <= rule.last && !in_span;
          if (!sees) c[n][group][2 * up + j] = -INFINITY;
          if (sees) seen |= 1U << (token >> 4);
        }
      }
    }
  }
  return __reduce_or_sync(0xFFFFFFFFU, seen);
}

template <class T>
template <class Values>
__device__ inline void WarpRow<T>::tile(int tile, bool readable, const std::uint8_t* keys,
                                        Values values) {
  using S = Scales<T::kFormat>;
  float c[T::kColumnBlocks][4][4];
  scores(keys, c);
  to_log2(c);
  const unsigned groups = mask(tile, readable, c);
  std::uint32_t p[T::kColumnBlocks][4][2];
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int group = 0; group < 4; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) top[i & 1] = fmaxf(top[i & 1], c[n][group][i]);
    }
    acc.raise(n, top[0], top[1]);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
#pragma unroll
      for (int up = 0; up < 2; ++up) {
        const float x = exp2_approx(c[n][group][2 * up] - acc.maximum[n][0]);
        const float y = exp2_approx(c[n][group][2 * up + 1] - acc.maximum[n][1]);
        acc.sum[n][0] += x;
        acc.sum[n][1] += y;
        p[n][group][up] = transpose8x8(bits_of(__floats2half2_rn(x, y)));
      }
    }
  }
  const std::uint8_t* v = values();
  const std::uint32_t keep = S::value_mask(groups, lane_);
  const int scale_at =
      static_cast<int>(T::kParts.value_scales - T::kParts.value_codes) + S::word_offset(lane_);
#pragma unroll
  for (int pair = 0; pair < T::kValueGroups; pair += 2) {
    uint4 words[2];
    LaneScales scale[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int m = pair + e;
      words[e] = *reinterpret_cast<const uint4*>(v + m * layout::kFragmentBytes + 16 * lane_);
      scale[e] = S::decode(
          keep & *reinterpret_cast<const std::uint32_t*>(v + scale_at + m * S::kBytesPerFragment));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t a[2][2][4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        operand_pair(half == 0 ? words[e].x : words[e].z, half == 0 ? words[e].y : words[e].w,
                     scale[e].of[0][half], scale[e].of[1][half], a[e]);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int n = 0; n < T::kColumnBlocks; ++n) {
          const std::uint32_t(&b)[2] = p[n][2 * half + step];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            mma_f16(acc.output[n][pair + e], a[e][step][0], a[e][step][1], a[e][step][2],
                    a[e][step][3], b[0], b[1]);
          }
        }
      }
    }
  }
}

}  // namespace bitdecoding::cuda
