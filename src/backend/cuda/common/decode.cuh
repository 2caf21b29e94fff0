// Decode attention over FP4 tiles and BF16 rows, one launch.
//
// The work of a step is a flat list of units: for each request, KV head and block of query rows,
// first the request's shadow units (sixteen BF16 rows), then its tiles (64 tokens). Every block of
// threads takes an equal share of the list; its warps take units in turn, each through its own ring
// of half units (K, then V), so that memory is always asked for more than is being worked on. At the
// end of a row's share the warps' results are added up; a row shared by several blocks is merged by
// the last of them to arrive.
//
// Tokens are the M side of the MMA and query rows the N side. With layout.h's order of K's rows the
// scores' accumulators, transposed, are the P operand.
//
// Scores are in log2 units. The running maximum is only raised when a score exceeds it by kSlack:
// probabilities then reach 2^kSlack, far inside FP16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/decode.h"
#include "common/mma.cuh"
#include "common/ring.cuh"
#include "common/tensor.cuh"
#include "common/unpack.cuh"
#include "page/layout.h"
#include "transform/hadamard.h"

namespace bitdecoding::cuda {

inline constexpr float kLog2e = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;
inline constexpr float kSlack = 8.0F;
// Instead of -inf, so that differences of two empty maxima are numbers.
inline constexpr float kNoMaximum = -1.0e30F;

template <Format kFormat_, int kHeadDim_, int kColumnBlocks_, int kWarps_, int kEntries_,
          template <int, int> class Ring_>
struct DecodeTraits {
  static constexpr Format kFormat = kFormat_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kColumnBlocks = kColumnBlocks_;
  static constexpr int kRows = kColumns * kColumnBlocks;
  static constexpr int kWarps = kWarps_;
  static constexpr int kEntries = kEntries_;
  static constexpr int kKeyBlocks = layout::key_column_blocks(kHeadDim);
  static constexpr int kValueGroups = kHeadDim / 16;
  static constexpr layout::TileParts kParts = layout::tile_parts(kFormat, kHeadDim);
  static constexpr int kKeyBytes = static_cast<int>(kParts.value_codes);
  static constexpr int kValueBytes = static_cast<int>(kParts.bytes - kParts.value_codes);
  static constexpr int kRowBytes = kUnitRows * kHeadDim * 2;
  static constexpr int kEntryBytes = kKeyBytes > kRowBytes ? kKeyBytes : kRowBytes;
  static_assert(kValueBytes <= kEntryBytes && kEntryBytes % 16 == 0);
  using Ring = Ring_<kEntryBytes, kEntries>;
};

// What a row needs besides its units; in shared memory.
template <class T>
struct RowState {
  // Queries, padded so that the eight columns of a fragment load fall into different banks.
  static constexpr int kPitch = T::kHeadDim + 8;
  __half rotated[T::kRows][kPitch];          // scaled by a power of two
  __nv_bfloat16 high[T::kRows][kPitch];      // as they came: high + low
  __nv_bfloat16 low[T::kRows][kPitch];
  float factor[T::kRows];  // score in log2 units = product * factor + offset, tiles
  float offset[T::kRows];
  std::int32_t position[T::kRows];  // of the query; -1: no such row, sees nothing
};

template <class T>
struct SharedStorage {
  static constexpr int kMergeWarps = T::kWarps / 2;
  static constexpr int kMergePitch = T::kHeadDim + 4;
  alignas(128) std::uint8_t ring[T::kWarps][T::kEntries][T::kEntryBytes];
  alignas(8) std::uint64_t barriers[T::kWarps][T::kEntries];
  RowState<T> row;
  float maximum[T::kWarps][T::kRows];
  float sum[T::kWarps][T::kRows];
  std::int32_t last[2];
  float merge[1];  // [kMergeWarps][rows in use][kMergePitch]
};

template <class T>
constexpr std::int64_t decode_shared_bytes(int rows_in_use) {
  return static_cast<std::int64_t>(sizeof(SharedStorage<T>)) +
         std::int64_t{4} * SharedStorage<T>::kMergeWarps * rows_in_use *
             SharedStorage<T>::kMergePitch;
}

// ---- the flat list of units ---------------------------------------------------------------------

// One row of the list: a request, KV head and block of query rows.
struct ListRow {
  std::int64_t begin = 0, end = 0;  // units in the list
  std::int32_t request = 0, head = 0, block = 0;
  std::int32_t num_units = 0;  // shadow units
  std::int32_t tile = 0;       // first tile
};

__device__ inline std::int64_t share_begin(std::int64_t units, int block, int blocks) {
  return units * block / blocks;
}
// The block whose share holds unit u.
__device__ inline int share_of(std::int64_t u, std::int64_t units, int blocks) {
  return static_cast<int>(((u + 1) * blocks - 1) / units);
}

__device__ inline int find_request(const PlanView& p, std::int64_t u) {
  int low = 0;
  int high = p.num_requests - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.prefix[middle] <= u) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The row that holds unit u < prefix[num_requests].
__device__ inline ListRow find_row(const DecodeArgs& a, std::int64_t u, int request) {
  ListRow row;
  while (a.plan.prefix[request + 1] <= u) ++request;
  const Request r = a.plan.requests[request];
  const int n = units_of(r, a.window_left);
  const std::int64_t base = a.plan.prefix[request];
  const int index = static_cast<int>((u - base) / n);
  const int blocks = row_blocks(r.query_len, a.num_q_heads / a.num_kv_heads, a.plan.columns);
  row.begin = base + static_cast<std::int64_t>(index) * n;
  row.end = row.begin + n;
  row.request = request;
  row.head = index / blocks;
  row.block = index % blocks;
  row.num_units = r.num_units;
  row.tile = first_tile(r, a.window_left);
  return row;
}

// Fills a warp's ring ahead of use.
template <class T>
class Producer {
 public:
  __device__ Producer(const DecodeArgs& a, const ListRow& row, std::int64_t first, std::int64_t end)
      : a_(a), row_(row), unit_(first), end_(end) {
    if (unit_ < end_) look_up();
  }

  // The next half unit into entry i.
  __device__ void fill(const typename T::Ring& ring, int i) {
    if (unit_ >= end_) {
      ring.fill_nothing();
      return;
    }
    if (!value_) {
      resolve();
      ring.fill(i, source_, shadow_ ? T::kRowBytes : T::kKeyBytes);
      value_ = true;
      return;
    }
    const std::uint8_t* from =
        source_ + (shadow_ ? a_.group_tokens * T::kHeadDim * 2 : T::kKeyBytes);
    ring.fill(i, from, shadow_ ? T::kRowBytes : T::kValueBytes);
    value_ = false;
    unit_ += T::kWarps;
    if (unit_ < end_) look_up();
  }

 private:
  // Starts the loads that say where the unit is; resolve() uses them one entry later.
  __device__ void look_up() {
    if (unit_ >= row_.end) row_ = find_row(a_, unit_, row_.request);
    const int i = static_cast<int>(unit_ - row_.begin);
    shadow_ = i < row_.num_units;
    if (shadow_) {
      const ShadowUnit& u =
          a_.plan.units[static_cast<std::int64_t>(row_.request) * a_.plan.unit_stride + i];
      slot_ = u.slot;
      offset_ = u.row / kUnitRows * kUnitRows;
      return;
    }
    const int tile = row_.tile + i - row_.num_units;
    const int page = tile / a_.plan.tiles_per_page;
    offset_ = tile - page * a_.plan.tiles_per_page;
    slot_ = page < a_.plan.page_stride
                ? a_.plan.pages[row_.request * a_.plan.page_stride + page]
                : -1;
  }

  __device__ void resolve() {
    if (shadow_) {
      const std::int64_t head =
          (static_cast<std::int64_t>(slot_) * a_.num_kv_heads + row_.head) * 2 * a_.group_tokens;
      source_ = reinterpret_cast<const std::uint8_t*>(a_.shadow) + (head + offset_) * T::kHeadDim * 2;
      return;
    }
    // A page outside the pool is never followed; tile() masks it by the same test.
    const int page = slot_ < 0 || slot_ >= a_.plan.num_pages ? 0 : slot_;
    source_ = a_.pages + page * a_.stride_page + row_.head * a_.stride_head +
              static_cast<std::int64_t>(offset_) * T::kParts.bytes;
  }

  const DecodeArgs& a_;
  ListRow row_;
  std::int64_t unit_, end_;
  const std::uint8_t* source_ = nullptr;
  std::int32_t slot_ = 0, offset_ = 0;
  bool shadow_ = false, value_ = false;
};

// ---- one warp's part of a row -------------------------------------------------------------------

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
  std::int32_t first = 0, last = -1;           // visible positions
  std::int32_t sink_end = 0, tail = 0x7FFFFFFF;  // BF16: before sink_end or from tail on
};

template <class T>
class WarpRow {
 public:
  __device__ WarpRow(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row)
      : a_(a), s_(s), row_(row), lane_(threadIdx.x & 31), g_(lane_ >> 2), t_(lane_ & 3) {
    const Request r = a.plan.requests[row.request];
    spans_ = a.plan.units + static_cast<std::int64_t>(row.request) * a.plan.unit_stride;
    const int first_query = r.seq_len - r.query_len;
    // Tiles in [plain_begin_, plain_end_) are seen whole by every column and hold no BF16 position.
    plain_begin_ = a.window_left < 0 ? 0 : max(r.seq_len - 1 - a.window_left, 0);
    plain_end_ = first_query + 1;
    for (int i = 0; i < row.num_units; ++i) {
      const ShadowUnit u = spans_[i];
      if (u.begin <= plain_begin_) {
        plain_begin_ = max(plain_begin_, u.end);
      } else {
        plain_end_ = min(plain_end_, u.begin);
      }
    }
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
      for (int step = 0; step < 4 * T::kKeyBlocks; ++step) {
        // Padded columns of K hold zeros; the query's are never loaded.
        if (16 * step >= T::kHeadDim) continue;
        const int dim = 32 * (step >> 1) + 8 * t_ + 4 * (step & 1);
        const uint2 q = *reinterpret_cast<const uint2*>(&s.row.rotated[kColumns * n + g_][dim]);
        query_[n][step][0] = q.x;
        query_[n][step][1] = q.y;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = kColumns * n + 2 * t_ + j;
        factor_[n][j] = s.row.factor[column];
        offset_[n][j] = s.row.offset[column];
      }
    }
    acc.clear();
  }

  // One tile: K at `keys` now, V when `values()` returns.
  template <class Values>
  __device__ void tile(int tile, bool readable, const std::uint8_t* keys, Values values);
  template <class Values>
  __device__ void shadow(int index, const std::uint8_t* keys, Values values);

  Accumulators<T> acc;

 private:
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
    for (int i = 0; i < row_.num_units; ++i) {
      const int low = max(spans_[i].begin - begin, 0);
      const int high = min(spans_[i].end - begin, kTileTokens);
      if (low < high) mask |= (~0ULL >> (64 - (high - low))) << low;
    }
    return mask;
  }
  __device__ void scores(const std::uint8_t* keys, float (&c)[T::kColumnBlocks][4][4]) const;
  __device__ void to_log2(float (&c)[T::kColumnBlocks][4][4]) const;
  __device__ unsigned mask(int tile, bool readable, float (&c)[T::kColumnBlocks][4][4]) const;
  __device__ float finish_score(float product, float factor, float offset) const {
    const float y = fmaf(product, factor, offset);
    return a_.softcap == 0.0F ? y : a_.softcap * kLog2e * tanh_fast(y);
  }

  const DecodeArgs& a_;
  SharedStorage<T>& s_;
  const ListRow& row_;
  const ShadowUnit* spans_;
  const int lane_, g_, t_;
  int plain_begin_, plain_end_;
  std::uint32_t query_[T::kColumnBlocks][4 * T::kKeyBlocks][2];
  float factor_[T::kColumnBlocks][2];
  float offset_[T::kColumnBlocks][2];
};

template <class T>
__device__ inline void WarpRow<T>::scores(const std::uint8_t* keys,
                                          float (&c)[T::kColumnBlocks][4][4]) const {
  using S = Scales<T::kFormat>;
  const int scale_at = static_cast<int>(T::kParts.key_scales) + S::word_offset(lane_);
#pragma unroll
  for (int group = 0; group < 4; ++group) {
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[n][group][i] = 0.0F;
    }
#pragma unroll
    for (int block = 0; block < T::kKeyBlocks; ++block) {
      const int fragment = group * T::kKeyBlocks + block;
      const uint4 words = *reinterpret_cast<const uint4*>(
          keys + fragment * layout::kFragmentBytes + 16 * lane_);
      const LaneScales scale = S::decode(*reinterpret_cast<const std::uint32_t*>(
          keys + scale_at + fragment * S::kBytesPerFragment));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (64 * block + 32 * half >= T::kHeadDim) continue;
        std::uint32_t a[2][4];
        operand_pair(half == 0 ? words.x : words.z, half == 0 ? words.y : words.w,
                     scale.of[0][half], scale.of[1][half], a);
#pragma unroll
        for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const std::uint32_t(&q)[2] = query_[n][4 * block + 2 * half + step];
            mma_f16(c[n][group], a[step][0], a[step][1], a[step][2], a[step][3], q[0], q[1]);
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
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int group = 0; group < 4; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        c[n][group][i] = finish_score(c[n][group][i], factor_[n][i & 1], offset_[n][i & 1]);
      }
    }
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
          const bool sees =
              readable && position >= rule.first && position <= rule.last && !in_span;
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
  for (int m = 0; m < T::kValueGroups; ++m) {
    const uint4 words =
        *reinterpret_cast<const uint4*>(v + m * layout::kFragmentBytes + 16 * lane_);
    const LaneScales scale = S::decode(
        keep & *reinterpret_cast<const std::uint32_t*>(v + scale_at + m * S::kBytesPerFragment));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t a[2][4];
      operand_pair(half == 0 ? words.x : words.z, half == 0 ? words.y : words.w, scale.of[0][half],
                   scale.of[1][half], a);
#pragma unroll
      for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const std::uint32_t(&b)[2] = p[n][2 * half + step];
          mma_f16(acc.output[n][m], a[step][0], a[step][1], a[step][2], a[step][3], b[0], b[1]);
        }
      }
    }
  }
}

// Sixteen BF16 rows. Queries and probabilities go in as two BF16 terms, so that nothing is lost to
// the format of the MMA.
template <class T>
template <class Values>
__device__ inline void WarpRow<T>::shadow(int index, const std::uint8_t* keys, Values values) {
  const ShadowUnit unit = spans_[index];
  const int first_row = unit.row % kUnitRows;
  const int last_row = first_row + (unit.end - unit.begin);
  const int origin = unit.begin - first_row;  // position of the sixteen rows' first
  float c[T::kColumnBlocks][4];
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0.0F;
  }
  const std::uint32_t key_at =
      shared_address(keys) + ((lane_ & 15) * T::kHeadDim + (lane_ >> 4) * 8) * 2;
#pragma unroll
  for (int step = 0; step < T::kHeadDim / 16; ++step) {
    std::uint32_t a[4];
    load_matrix(a, key_at + 32 * step);
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
      const __nv_bfloat16* high = &s_.row.high[kColumns * n + g_][16 * step + 2 * t_];
      const __nv_bfloat16* low = &s_.row.low[kColumns * n + g_][16 * step + 2 * t_];
      mma_bf16(c[n], a, *reinterpret_cast<const std::uint32_t*>(high),
               *reinterpret_cast<const std::uint32_t*>(high + 8));
      mma_bf16(c[n], a, *reinterpret_cast<const std::uint32_t*>(low),
               *reinterpret_cast<const std::uint32_t*>(low + 8));
    }
  }
  const float factor = a_.softcap == 0.0F ? a_.sm_scale * kLog2e : a_.sm_scale / a_.softcap;
  const float to_tiles =
      exp2f(static_cast<float>(Scales<T::kFormat>::kExponent) -
            (a_.value_outer == nullptr ? 0.0F : static_cast<float>(a_.value_outer[row_.head])));
  std::uint32_t high[T::kColumnBlocks][2];
  std::uint32_t low[T::kColumnBlocks][2];
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const ColumnRule rule = rule_of(kColumns * n + 2 * t_ + (i & 1));
      const int row = g_ + 8 * (i >> 1);
      const int position = origin + row;
      const bool sees = row >= first_row && row < last_row && position >= rule.first &&
                        position <= rule.last && is_bf16(rule, position);
      c[n][i] = sees ? finish_score(c[n][i], factor, 0.0F) : -INFINITY;
      top[i & 1] = fmaxf(top[i & 1], c[n][i]);
    }
    acc.raise(n, top[0], top[1]);
#pragma unroll
    for (int up = 0; up < 2; ++up) {
      const float x = exp2_approx(c[n][2 * up] - acc.maximum[n][0]);
      const float y = exp2_approx(c[n][2 * up + 1] - acc.maximum[n][1]);
      acc.sum[n][0] += x;
      acc.sum[n][1] += y;
      std::uint32_t rest;
      high[n][up] = transpose8x8(split_bf16(x * to_tiles, y * to_tiles, &rest));
      low[n][up] = transpose8x8(rest);
    }
  }
  // Rows outside the span may hold anything.
  std::uint32_t keep[2];
#pragma unroll
  for (int up = 0; up < 2; ++up) {
    const int row = 2 * t_ + 8 * up;
    keep[up] = (row >= first_row && row < last_row ? 0xFFFFU : 0U) |
               (row + 1 >= first_row && row + 1 < last_row ? 0xFFFF0000U : 0U);
  }
  const std::uint8_t* v = values();
  const std::uint32_t value_at =
      shared_address(v) +
      (((lane_ & 7) + 8 * (lane_ >> 4)) * T::kHeadDim + 8 * ((lane_ >> 3) & 1)) * 2;
#pragma unroll
  for (int m = 0; m < T::kValueGroups; ++m) {
    std::uint32_t a[4];
    load_matrix_transposed(a, value_at + 32 * m);
    a[0] &= keep[0];
    a[1] &= keep[0];
    a[2] &= keep[1];
    a[3] &= keep[1];
#pragma unroll
    for (int n = 0; n < T::kColumnBlocks; ++n) {
      mma_bf16(acc.output[n][m], a, high[n][0], high[n][1]);
      mma_bf16(acc.output[n][m], a, low[n][0], low[n][1]);
    }
  }
}

// ---- rows: queries in, results out --------------------------------------------------------------

// Query rows of the block, one a warp at a time: as BF16 terms, and rotated, scaled to FP16.
template <class T>
__device__ inline void load_queries(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row) {
  constexpr int kBlock = hadamard_block(T::kHeadDim);
  constexpr int kParts = T::kHeadDim / kBlock;
  constexpr int kEach = kBlock / 32;
  const int lane = threadIdx.x & 31;
  const Request r = a.plan.requests[row.request];
  const int group = a.num_q_heads / a.num_kv_heads;
  for (int i = threadIdx.x >> 5; i < T::kRows; i += T::kWarps) {
    const int index = row.block * T::kRows + i;
    const int token = index / group;
    const bool exists = token < r.query_len;
    float x[kParts][kEach];
    float dot = 0.0F;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int dim = part * kBlock + lane * kEach + e;
        const int head = row.head * group + index % group;
        x[part][e] = !exists ? 0.0F
                             : load_element(a.query, a.query_dtype,
                                            (r.query_begin + token) * a.query_stride_token +
                                                head * a.query_stride_head + dim);
        if (a.key_shift != nullptr) dot += x[part][e] * a.key_shift[row.head * T::kHeadDim + dim];
        const __nv_bfloat16 high = __float2bfloat16_rn(x[part][e]);
        s.row.high[i][dim] = high;
        s.row.low[i][dim] = __float2bfloat16_rn(x[part][e] - __bfloat162float(high));
      }
      if (!a.hadamard) continue;
#pragma unroll
      for (int stride = 1; stride < kEach; stride *= 2) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          if ((e & stride) != 0) continue;
          const float u = x[part][e];
          const float v = x[part][e + stride];
          x[part][e] = u + v;
          x[part][e + stride] = u - v;
        }
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float other = __shfl_xor_sync(0xFFFFFFFFU, x[part][e], step);
          x[part][e] = (lane & step) == 0 ? x[part][e] + other : other - x[part][e];
        }
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) x[part][e] *= hadamard_scale(kBlock);
    }
    float top = 0.0F;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) top = fmaxf(top, fabsf(x[part][e]));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, step));
      dot += __shfl_xor_sync(0xFFFFFFFFU, dot, step);
    }
    // The row's largest value comes to [1, 2): FP16 keeps 11 bits of every product that matters.
    const int exponent = top > 0.0F && isfinite(top) ? ilogbf(top) : 0;
    const float down = exp2f(static_cast<float>(-exponent));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        s.row.rotated[i][part * kBlock + lane * kEach + e] = __float2half_rn(x[part][e] * down);
      }
    }
    if (lane == 0) {
      const int outer = a.key_outer == nullptr ? 0 : a.key_outer[row.head];
      const float unit = a.softcap == 0.0F ? a.sm_scale * kLog2e : a.sm_scale / a.softcap;
      s.row.factor[i] =
          unit * exp2f(static_cast<float>(exponent + outer - Scales<T::kFormat>::kExponent));
      s.row.offset[i] = unit * dot;
      s.row.position[i] = exists ? r.seq_len - r.query_len + token : -1;
    }
  }
}

// One finished query row element range, from a sum in tile units.
struct RowResult {
  float weight = 0.0F;  // output = sum * weight
  float lse = -INFINITY;
};

template <class T>
__device__ inline RowResult finish(const DecodeArgs& a, int q_head, int kv_head, float maximum,
                                   float sum) {
  RowResult result;
  if (sum == 0.0F) return result;
  if (a.attn_sink != nullptr) {
    // The learned sink enters the denominator once, here.
    const float sink = a.attn_sink[q_head] * kLog2e;
    const float top = fmaxf(maximum, sink);
    const float scale = exp2_approx(maximum - top);
    const float whole = sum * scale + exp2_approx(sink - top);
    result.weight = scale / whole;
    result.lse = (top + log2f(whole)) * kLn2;
  } else {
    result.weight = 1.0F / sum;
    result.lse = (maximum + log2f(sum)) * kLn2;
  }
  const int outer = a.value_outer == nullptr ? 0 : a.value_outer[kv_head];
  result.weight *= exp2f(static_cast<float>(outer - Scales<T::kFormat>::kExponent));
  return result;
}

template <class T>
__device__ inline void store_row(const DecodeArgs& a, const ListRow& row, int column, int dim,
                                 float sum_of_values, const RowResult& result) {
  const Request& r = a.plan.requests[row.request];
  const int group = a.num_q_heads / a.num_kv_heads;
  const int index = row.block * T::kRows + column;
  const int token = index / group;
  if (token >= r.query_len) return;
  const int head = row.head * group + index % group;
  const float x = result.weight == 0.0F ? 0.0F : sum_of_values * result.weight;
  store_element(a.output, a.output_dtype,
                (r.query_begin + token) * a.output_stride_token + head * a.output_stride_head + dim,
                x);
  if (dim == 0 && a.lse != nullptr) {
    a.lse[static_cast<std::int64_t>(r.query_begin + token) * a.num_q_heads + head] = result.lse;
  }
}

// Adds the warps' accumulators up; afterwards warp 0 holds the block's share of the row.
template <class T>
__device__ inline void merge_warps(SharedStorage<T>& s, Accumulators<T>& acc, int rows_in_use) {
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  const int g = lane >> 2;
  const int t = lane & 3;
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = acc.sum[n][j];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, step);
      acc.sum[n][j] = sum;
      if (g == 0) {
        s.maximum[warp][kColumns * n + 2 * t + j] = acc.maximum[n][j];
        s.sum[warp][kColumns * n + 2 * t + j] = sum;
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = kColumns * n + 2 * t + j;
      float top = kNoMaximum;
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) top = fmaxf(top, s.maximum[w][column]);
      float sum = 0.0F;
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        sum += s.sum[w][column] * exp2_approx(s.maximum[w][column] - top);
      }
      const float alpha = exp2_approx(acc.maximum[n][j] - top);
      acc.maximum[n][j] = top;
      acc.sum[n][j] = sum;
#pragma unroll
      for (int m = 0; m < T::kValueGroups; ++m) {
        acc.output[n][m][j] *= alpha;
        acc.output[n][m][j + 2] *= alpha;
      }
    }
  }
  constexpr int kPitch = SharedStorage<T>::kMergePitch;
  for (int width = T::kWarps / 2; width >= 1; width /= 2) {
    const bool gives = warp >= width && warp < 2 * width;
    if (gives || warp < width) {
      float* buffer = s.merge + (gives ? warp - width : warp) * rows_in_use * kPitch;
      if (!gives) __syncthreads();
#pragma unroll
      for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = kColumns * n + 2 * t + (i & 1);
          if (column >= rows_in_use) continue;
#pragma unroll
          for (int m = 0; m < T::kValueGroups; ++m) {
            float& at = buffer[column * kPitch + 16 * m + g + 8 * (i >> 1)];
            if (gives) {
              at = acc.output[n][m][i];
            } else {
              acc.output[n][m][i] += at;
            }
          }
        }
      }
      if (gives) __syncthreads();
    } else {
      __syncthreads();
    }
    // The buffers are free again before the next, narrower round writes them.
    __syncthreads();
  }
}

// Warp 0: the finished row, or this block's part of it into the workspace.
template <class T>
__device__ inline void store_share(const DecodeArgs& a, const ListRow& row,
                                   const Accumulators<T>& acc, float* partial, int rows_in_use) {
  const int lane = threadIdx.x & 31;
  const int g = lane >> 2;
  const int t = lane & 3;
  const int group = a.num_q_heads / a.num_kv_heads;
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = kColumns * n + 2 * t + j;
      if (column >= rows_in_use) continue;
      RowResult result;
      if (partial == nullptr) {
        const int q_head = row.head * group + (row.block * T::kRows + column) % group;
        result = finish<T>(a, q_head, row.head, acc.maximum[n][j], acc.sum[n][j]);
      }
      float* out = partial + column * (T::kHeadDim + 2);
#pragma unroll
      for (int m = 0; m < T::kValueGroups; ++m) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          const int dim = 16 * m + g + 8 * up;
          const float x = acc.output[n][m][j + 2 * up];
          if (partial == nullptr) {
            store_row<T>(a, row, column, dim, x, result);
          } else {
            out[dim] = x;
          }
        }
      }
      if (partial != nullptr && g == 0) {
        out[T::kHeadDim] = acc.maximum[n][j];
        out[T::kHeadDim + 1] = acc.sum[n][j];
      }
    }
  }
}

// All parts of a row that several blocks share, by every thread of the last block to arrive.
template <class T>
__device__ inline void merge_blocks(const DecodeArgs& a, const ListRow& row, std::int64_t units,
                                    int rows_in_use) {
  const int blocks = gridDim.x;
  const int first = share_of(row.begin, units, blocks);
  const bool dense = units >= blocks;  // no block has an empty share
  const int parts = dense ? share_of(row.end - 1, units, blocks) - first + 1
                          : static_cast<int>(row.end - row.begin);
  const std::int64_t stride = partial_floats(T::kRows, T::kHeadDim);
  const auto part_of = [&](int k) {
    const int block = dense ? first + k : share_of(row.begin + k, units, blocks);
    const int which = share_begin(units, block, blocks) > row.begin ? 0 : 1;
    return a.partials + (2 * static_cast<std::int64_t>(block) + which) * stride;
  };
  const int group = a.num_q_heads / a.num_kv_heads;
  for (int i = threadIdx.x; i < rows_in_use * T::kHeadDim; i += 32 * T::kWarps) {
    const int column = i / T::kHeadDim;
    const int dim = i % T::kHeadDim;
    const int at = column * (T::kHeadDim + 2);
    float top = kNoMaximum;
#pragma unroll 8
    for (int k = 0; k < parts; ++k) top = fmaxf(top, __ldcg(part_of(k) + at + T::kHeadDim));
    float sum = 0.0F;
    float value = 0.0F;
#pragma unroll 8
    for (int k = 0; k < parts; ++k) {
      const float* part = part_of(k) + at;
      const float weight = exp2_approx(__ldcg(part + T::kHeadDim) - top);
      sum += weight * __ldcg(part + T::kHeadDim + 1);
      value += weight * __ldcg(part + dim);
    }
    const int q_head = row.head * group + (row.block * T::kRows + column) % group;
    store_row<T>(a, row, column, dim, value, finish<T>(a, q_head, row.head, top, sum));
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(32 * T::kWarps, 1) decode_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) std::uint8_t raw[];
  auto& s = *reinterpret_cast<SharedStorage<T>*>(raw);
  const std::int64_t units = a.plan.prefix[a.plan.num_requests];
  const int blocks = gridDim.x;
  const std::int64_t begin = share_begin(units, blockIdx.x, blocks);
  const std::int64_t end = share_begin(units, blockIdx.x + 1, blocks);
  if (begin >= end) return;
  const int warp = threadIdx.x >> 5;
  const typename T::Ring ring(&s.ring[warp][0][0], &s.barriers[warp][0]);
  ListRow row = find_row(a, begin, find_request(a.plan, begin));
  Producer<T> producer(a, row, begin + warp, end);
#pragma unroll
  for (int i = 0; i < T::kEntries; ++i) producer.fill(ring, i);

  int entry = 0;
  std::uint32_t parity = 0;
  const auto next_entry = [&] {
    __syncwarp();
    producer.fill(ring, entry);
    if (++entry == T::kEntries) {
      entry = 0;
      parity ^= 1U;
    }
  };
  const int rows_in_use = [&] {
    const int group = a.num_q_heads / a.num_kv_heads;
    return T::kColumnBlocks == 1 ? min(group * a.plan.columns, T::kRows) : T::kRows;
  }();

  std::int64_t unit = begin + warp;
  int num_shared = 0;  // rows of this block that other blocks share: at most its first and its last
  ListRow shared[2];
  while (true) {
    load_queries<T>(a, s, row);
    __syncthreads();
    WarpRow<T> work(a, s, row);
    const std::int64_t stop = row.end < end ? row.end : end;
    for (; unit < stop; unit += T::kWarps) {
      const int i = static_cast<int>(unit - row.begin);
      ring.wait(entry, parity);
      const std::uint8_t* keys = ring.entry(entry);
      const auto values = [&] {
        next_entry();
        ring.wait(entry, parity);
        return static_cast<const std::uint8_t*>(ring.entry(entry));
      };
      if (i < row.num_units) {
        work.shadow(i, keys, values);
      } else {
        const int tile = row.tile + i - row.num_units;
        const int page = tile / a.plan.tiles_per_page;
        bool readable = true;
        if (tile == row.tile || true) {
          const int id = page < a.plan.page_stride
                             ? a.plan.pages[row.request * a.plan.page_stride + page]
                             : -1;
          readable = id >= 0 && id < a.plan.num_pages;
        }
        work.tile(tile, readable, keys, values);
      }
      next_entry();
    }
    merge_warps<T>(s, work.acc, rows_in_use);
    const bool whole = row.begin >= begin && row.end <= end;
    if (warp == 0) {
      float* partial = nullptr;
      if (!whole) {
        const int which = begin > row.begin ? 0 : 1;
        partial = a.partials + (2 * static_cast<std::int64_t>(blockIdx.x) + which) *
                                   partial_floats(T::kRows, T::kHeadDim);
      }
      store_share<T>(a, row, work.acc, partial, rows_in_use);
    }
    if (!whole) shared[num_shared++] = row;
    if (row.end >= end) break;
    row = find_row(a, row.end, row.request);
  }

  if (num_shared == 0) return;
  if (threadIdx.x == 0) {
    __threadfence();
    for (int i = 0; i < num_shared; ++i) {
      const ListRow& r = shared[i];
      const int first = share_of(r.begin, units, blocks);
      const int parts = units >= blocks ? share_of(r.end - 1, units, blocks) - first + 1
                                        : static_cast<int>(r.end - r.begin);
      // One counter a row; rows are told apart by the block that holds their first unit, and of
      // the rows that begin in a block only the last is shared.
      const int before = atomicAdd(a.arrivals + first, 1);
      s.last[i] = before == parts - 1 ? 1 : 0;
      if (s.last[i] != 0) a.arrivals[first] = 0;
    }
    __threadfence();
  }
  __syncthreads();
  for (int i = 0; i < num_shared; ++i) {
    if (s.last[i] != 0) merge_blocks<T>(a, shared[i], units, rows_in_use);
  }
}

}  // namespace bitdecoding::cuda
