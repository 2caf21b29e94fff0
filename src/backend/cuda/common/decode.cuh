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
  // A ring that a warp of its own fills adds that warp to the block.
  static constexpr int kThreads = 32 * (kWarps + (Ring::kOwnWarp ? 1 : 0));
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
  static constexpr int kMergePitch = T::kHeadDim + 4;
  typename T::Ring ring[T::kWarps];
  RowState<T> row;
  float maximum[T::kWarps][T::kRows];
  float sum[T::kWarps][T::kRows];
  std::int32_t last[2];
  float merge[1];  // [kWarps][rows in use][kMergePitch]
};

template <class T>
constexpr std::int64_t decode_shared_bytes(int rows_in_use) {
  return static_cast<std::int64_t>(sizeof(SharedStorage<T>)) +
         std::int64_t{4} * T::kWarps * rows_in_use * SharedStorage<T>::kMergePitch;
}

// ---- the flat list of units ---------------------------------------------------------------------

// One row of the list: a request, KV head and block of query rows.
struct ListRow {
  std::int32_t begin = 0, end = 0;  // units in the list
  std::int32_t request = 0, head = 0, block = 0;
  std::int32_t num_units = 0;  // shadow units
  std::int32_t tile = 0;       // first tile
};

// Shares of the list that differ by at most one unit, in 32-bit arithmetic.
struct Shares {
  std::int32_t base, rest;

  __device__ Shares(std::int32_t units, std::int32_t blocks)
      : base(units / blocks), rest(units - base * blocks) {}
  __device__ std::int32_t begin(std::int32_t block) const { return block * base + min(block, rest); }
  // The block whose share holds unit u. Only blocks without work follow the last one that has some.
  __device__ std::int32_t of(std::int32_t u) const {
    const std::int32_t large = rest * (base + 1);
    return u < large ? u / (base + 1) : rest + (u - large) / base;
  }
};

__device__ inline int find_request(const PlanView& p, std::int32_t u) {
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

// The row that holds unit u < prefix[num_requests]. Not inlined: met once a row, but called from the
// loop over units.
static __device__ __noinline__ ListRow find_row(const DecodeArgs& a, std::int32_t u, int request) {
  ListRow row;
  while (a.plan.prefix[request + 1] <= u) ++request;
  const Request r = a.plan.requests[request];
  const int n = units_of(r, a.window_left);
  const std::int32_t base = a.plan.prefix[request];
  const std::int32_t index = (u - base) / n;
  const int blocks = row_blocks(r.query_len, a.group, a.plan.columns);
  row.begin = base + index * n;
  row.end = row.begin + n;
  row.request = request;
  row.head = index / blocks;
  row.block = index % blocks;
  row.num_units = r.num_units;
  row.tile = first_tile(r, a.window_left);
  return row;
}

// The copies that one warp needs, in turn: of each of its units K, then V.
template <class T>
class Producer {
 public:
  struct Copy {
    const std::uint8_t* from;
    int bytes;
    bool unreadable;  // a page outside the pool: another is copied in its stead, and masked
  };

  __device__ Producer(const DecodeArgs& a, const ListRow& row, std::int32_t first, std::int32_t end)
      : a_(a), row_(row), unit_(first), end_(end) {
    if (unit_ < end_) look_up();
  }

  __device__ bool done() const { return unit_ >= end_; }

  __device__ Copy next() {
    if (!value_) {
      resolve();
      value_ = true;
      return {source_, shadow_ ? T::kRowBytes : T::kKeyBytes, unreadable_};
    }
    const Copy copy{source_ + (shadow_ ? a_.group_tokens * T::kHeadDim * 2 : T::kKeyBytes),
                    shadow_ ? T::kRowBytes : T::kValueBytes, unreadable_};
    value_ = false;
    unit_ += T::kWarps;
    if (unit_ < end_) look_up();
    return copy;
  }

 private:
  // Starts the loads that say where the unit is; resolve() uses them one copy later.
  __device__ void look_up() {
    if (unit_ >= row_.end) row_ = find_row(a_, unit_, row_.request);
    const int i = unit_ - row_.begin;
    shadow_ = i < row_.num_units;
    if (shadow_) {
      const ShadowUnit& u =
          a_.plan.units[static_cast<std::int64_t>(row_.request) * a_.plan.unit_stride + i];
      slot_ = u.slot;
      offset_ = u.row / kUnitRows * kUnitRows;
      return;
    }
    const int tile = row_.tile + i - row_.num_units;
    const int page =
        a_.plan.tiles_per_page == 1
            ? tile
            : static_cast<int>(__umulhi(static_cast<unsigned>(tile), a_.plan.page_reciprocal));
    offset_ = tile - page * a_.plan.tiles_per_page;
    slot_ = page < a_.plan.page_stride
                ? a_.plan.pages[row_.request * a_.plan.page_stride + page]
                : -1;
  }

  __device__ void resolve() {
    unreadable_ = false;
    if (shadow_) {
      const std::int64_t head =
          (static_cast<std::int64_t>(slot_) * a_.num_kv_heads + row_.head) * 2 * a_.group_tokens;
      source_ = reinterpret_cast<const std::uint8_t*>(a_.shadow) + (head + offset_) * T::kHeadDim * 2;
      return;
    }
    int page = slot_;
    if (page < 0 || page >= a_.plan.num_pages) {
      page = 0;
      unreadable_ = true;
      atomicAdd(a_.plan.bad_pages, 1ULL);
    }
    source_ = a_.pages + page * a_.stride_page + row_.head * a_.stride_head +
              static_cast<std::int64_t>(offset_) * T::kParts.bytes;
  }

  const DecodeArgs& a_;
  ListRow row_;
  std::int32_t unit_, end_;
  const std::uint8_t* source_ = nullptr;
  std::int32_t slot_ = 0, offset_ = 0;
  bool shadow_ = false, value_ = false, unreadable_ = false;
};

// Barrier of the warps that compute.
template <class T>
__device__ inline void sync_workers() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * T::kWarps) : "memory");
}

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
    // Spans in the first quarter of the sequence push the beginning, others the end: tiles between
    // a sink and a tail are what is to be found fast; a tile taken for a border tile costs little.
    const int middle = r.seq_len / 4;
    for (int base = 0; base < row.num_units; base += 32) {
      if (base + lane_ >= row.num_units) break;
      const ShadowUnit u = spans_[base + lane_];
      if (u.begin < middle) {
        plain_begin_ = max(plain_begin_, u.end);
      } else {
        plain_end_ = min(plain_end_, u.begin);
      }
    }
    __syncwarp();
    plain_begin_ = __reduce_max_sync(0xFFFFFFFFU, plain_begin_);
    plain_end_ = __reduce_min_sync(0xFFFFFFFFU, plain_end_);
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
    for (int i = lane_; i < row_.num_units; i += 32) {
      const ShadowUnit u = spans_[i];
      const int low = max(u.begin - begin, 0);
      const int high = min(u.end - begin, kTileTokens);
      if (low < high) mask |= (~0ULL >> (64 - (high - low))) << low;
    }
    __syncwarp();
    const std::uint32_t lower = __reduce_or_sync(0xFFFFFFFFU, static_cast<std::uint32_t>(mask));
    const std::uint32_t upper = __reduce_or_sync(0xFFFFFFFFU, static_cast<std::uint32_t>(mask >> 32));
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

  // One column block's queries stay in registers; two would push accumulators out.
  static constexpr int kHeldSteps = T::kColumnBlocks == 1 ? 4 * T::kKeyBlocks : 0;

  const DecodeArgs& a_;
  SharedStorage<T>& s_;
  const ListRow& row_;
  const ShadowUnit* spans_;
  const int lane_, g_, t_;
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
        words[e] = *reinterpret_cast<const uint4*>(keys + fragment * layout::kFragmentBytes +
                                                   16 * lane_);
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
  for (int pair = 0; pair < T::kValueGroups; pair += 2) {
    uint4 words[2];
    LaneScales scale[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int m = pair + e;
      words[e] = *reinterpret_cast<const uint4*>(v + m * layout::kFragmentBytes + 16 * lane_);
      scale[e] = S::decode(keep & *reinterpret_cast<const std::uint32_t*>(
                                      v + scale_at + m * S::kBytesPerFragment));
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
  const float to_tiles = power_of_two(
      Scales<T::kFormat>::kExponent - (a_.value_outer == nullptr ? 0 : a_.value_outer[row_.head]));
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
  for (int i = threadIdx.x >> 5; i < T::kRows; i += T::kWarps) {
    const int index = row.block * T::kRows + i;
    const int token = index / a.group;
    const bool exists = token < r.query_len;
    float x[kParts][kEach];
    float dot = 0.0F;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int dim = part * kBlock + lane * kEach + e;
        const int head = row.head * a.group + index - token * a.group;
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
    const int biased = static_cast<int>(__float_as_uint(top) >> 23);
    const int exponent = biased > 0 && biased < 255 ? biased - 127 : 0;
    const float down = power_of_two(-exponent);
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
          unit * power_of_two(exponent) * power_of_two(outer - Scales<T::kFormat>::kExponent);
      s.row.offset[i] = unit * dot;
      s.row.position[i] = exists ? r.seq_len - r.query_len + token : -1;
    }
  }
}

// Two neighbouring channels of a finished query row. `value` is in the units of the tiles' products.
template <class T>
__device__ inline void store_pair(const DecodeArgs& a, const ListRow& row, int column, int dim,
                                  float2 value, float maximum, float sum) {
  const Request& r = a.plan.requests[row.request];
  const int index = row.block * T::kRows + column;
  const int token = index / a.group;
  if (token >= r.query_len) return;
  const int head = row.head * a.group + index - token * a.group;
  float weight = 0.0F;
  float lse = -INFINITY;
  if (sum != 0.0F) {
    float whole = sum;
    float top = maximum;
    if (a.attn_sink != nullptr) {
      // The learned sink enters the denominator once, here.
      const float sink = a.attn_sink[head] * kLog2e;
      top = fmaxf(maximum, sink);
      whole = sum * exp2_approx(maximum - top) + exp2_approx(sink - top);
    }
    const int outer = a.value_outer == nullptr ? 0 : a.value_outer[row.head];
    weight = exp2_approx(maximum - top) * power_of_two(outer - Scales<T::kFormat>::kExponent) / whole;
    lse = (top + log2f(whole)) * kLn2;
  }
  const std::int64_t at =
      (r.query_begin + token) * a.output_stride_token + head * a.output_stride_head + dim;
  // A sum of nothing is zero, whatever the values hold.
  store_element(a.output, a.output_dtype, at, weight == 0.0F ? 0.0F : value.x * weight);
  store_element(a.output, a.output_dtype, at + 1, weight == 0.0F ? 0.0F : value.y * weight);
  if (dim == 0 && a.lse != nullptr) {
    a.lse[static_cast<std::int64_t>(r.query_begin + token) * a.num_q_heads + head] = lse;
  }
}

// Lays the warps' accumulators down for store_share, each with its own maximum.
template <class T>
__device__ inline void lay_down(SharedStorage<T>& s, const Accumulators<T>& acc, int rows_in_use) {
  constexpr int kPitch = SharedStorage<T>::kMergePitch;
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  const int g = lane >> 2;
  const int t = lane & 3;
  float* to = s.merge + warp * rows_in_use * kPitch;
#pragma unroll
  for (int n = 0; n < T::kColumnBlocks; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = kColumns * n + 2 * t + j;
      float sum = acc.sum[n][j];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, step);
      if (column >= rows_in_use) continue;
      if (g == 0) {
        s.maximum[warp][column] = acc.maximum[n][j];
        s.sum[warp][column] = sum;
      }
#pragma unroll
      for (int m = 0; m < T::kValueGroups; ++m) {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
          to[column * kPitch + 16 * m + g + 8 * up] = acc.output[n][m][j + 2 * up];
        }
      }
    }
  }
  sync_workers<T>();
}

// Adds the warps' shares up: the finished row, or this block's part of it into the workspace.
template <class T>
__device__ inline void store_share(const DecodeArgs& a, const SharedStorage<T>& s,
                                   const ListRow& row, float* partial, int rows_in_use) {
  constexpr int kPitch = SharedStorage<T>::kMergePitch;
  for (int i = threadIdx.x; i < rows_in_use * T::kHeadDim / 2; i += 32 * T::kWarps) {
    const int column = 2 * i / T::kHeadDim;
    const int dim = 2 * i % T::kHeadDim;
    float top = kNoMaximum;
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) top = fmaxf(top, s.maximum[w][column]);
    float sum = 0.0F;
    float2 value = {0.0F, 0.0F};
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) {
      const float weight = exp2_approx(s.maximum[w][column] - top);
      const auto x = *reinterpret_cast<const float2*>(
          &s.merge[(w * rows_in_use + column) * kPitch + dim]);
      sum += weight * s.sum[w][column];
      value.x = fmaf(weight, x.x, value.x);
      value.y = fmaf(weight, x.y, value.y);
    }
    if (partial == nullptr) {
      store_pair<T>(a, row, column, dim, value, top, sum);
      continue;
    }
    float* out = partial + column * (T::kHeadDim + 2);
    *reinterpret_cast<float2*>(out + dim) = value;
    if (dim == 0) *reinterpret_cast<float2*>(out + T::kHeadDim) = {top, sum};
  }
}

// All parts of a row that several blocks share, by every thread of the last block to arrive.
template <class T>
__device__ inline void merge_blocks(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row,
                                    const Shares& shares, int rows_in_use) {
  const int first = shares.of(row.begin);
  const int parts = shares.of(row.end - 1) - first + 1;
  const std::int64_t stride = partial_floats(T::kRows, T::kHeadDim);
  // The row is the last of its first block, and the first of all others.
  const auto part_of = [&](int k) {
    return a.partials + (2 * static_cast<std::int64_t>(first + k) + (k == 0 ? 1 : 0)) * stride;
  };
  // One warp a query row finds the parts' weights, all loads at once; they go where the ring was.
  auto* weights = reinterpret_cast<float*>(&s.ring[0]);  // [rows][parts]
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  for (int column = warp; column < rows_in_use; column += T::kWarps) {
    const int at = column * (T::kHeadDim + 2) + T::kHeadDim;
    float top = kNoMaximum;
    for (int k = lane; k < parts; k += 32) top = fmaxf(top, __ldcg(part_of(k) + at));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, step));
    }
    float sum = 0.0F;
    for (int k = lane; k < parts; k += 32) {
      const float weight = exp2_approx(__ldcg(part_of(k) + at) - top);
      weights[column * parts + k] = weight;
      sum += weight * __ldcg(part_of(k) + at + 1);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, step);
    if (lane == 0) {
      s.maximum[0][column] = top;
      s.sum[0][column] = sum;
    }
  }
  sync_workers<T>();
  for (int i = threadIdx.x; i < rows_in_use * T::kHeadDim / 2; i += 32 * T::kWarps) {
    const int column = 2 * i / T::kHeadDim;
    const int dim = 2 * i % T::kHeadDim;
    const int at = column * (T::kHeadDim + 2) + dim;
    float2 value = {0.0F, 0.0F};
#pragma unroll 8
    for (int k = 0; k < parts; ++k) {
      const float weight = weights[column * parts + k];
      const float2 x = __ldcg(reinterpret_cast<const float2*>(part_of(k) + at));
      value.x = fmaf(weight, x.x, value.x);
      value.y = fmaf(weight, x.y, value.y);
    }
    store_pair<T>(a, row, column, dim, value, s.maximum[0][column], s.sum[0][column]);
  }
  sync_workers<T>();
}

// ---- the kernel ---------------------------------------------------------------------------------

// The warp that fills all rings: lane w serves warp w.
template <class T>
__device__ inline void fill_rings(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row,
                                  std::int32_t begin, std::int32_t end) {
  static_assert(T::kWarps <= 32);
  const int lane = threadIdx.x & 31;
  if (lane >= T::kWarps) return;
  BulkSource<typename T::Ring, T::kEntries, Producer<T>> source(
      s.ring[lane], Producer<T>(a, row, begin + lane, end));
  while (!source.done()) {
    if (!source.poll()) __nanosleep(40);
  }
}

template <class T>
__device__ inline auto make_feed(const DecodeArgs& a, SharedStorage<T>& s, const ListRow& row,
                                 std::int32_t first, std::int32_t end) {
  const int warp = threadIdx.x >> 5;
  if constexpr (T::Ring::kOwnWarp) {
    return BulkFeed<typename T::Ring, T::kEntries>(s.ring[warp]);
  } else {
    return AsyncCopyFeed<typename T::Ring, T::kEntries, Producer<T>>(s.ring[warp],
                                                                    Producer<T>(a, row, first, end));
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) std::uint8_t raw[];
  auto& s = *reinterpret_cast<SharedStorage<T>*>(raw);
  const int warp = threadIdx.x >> 5;
  if (threadIdx.x < T::kWarps) s.ring[threadIdx.x].init();
  const Shares shares(a.plan.prefix[a.plan.num_requests], static_cast<int>(gridDim.x));
  const std::int32_t begin = shares.begin(static_cast<int>(blockIdx.x));
  const std::int32_t end = shares.begin(static_cast<int>(blockIdx.x) + 1);
  if (begin >= end) return;
  ListRow row = find_row(a, begin, find_request(a.plan, begin));
  __syncthreads();
  if (warp == T::kWarps) {
    if constexpr (T::Ring::kOwnWarp) fill_rings<T>(a, s, row, begin, end);
    return;
  }
  auto feed = make_feed<T>(a, s, row, begin + warp, end);

  std::int32_t unit = begin + warp;
  int num_shared = 0;  // rows of this block that other blocks share: at most its first and its last
  ListRow shared[2];
  while (true) {
    load_queries<T>(a, s, row);
    sync_workers<T>();
    WarpRow<T> work(a, s, row);
    const std::int32_t stop = min(row.end, end);
    for (; unit < stop; unit += T::kWarps) {
      const int i = unit - row.begin;
      const std::uint8_t* keys = feed.wait();
      const auto values = [&] {
        feed.next();
        return feed.wait();
      };
      if (i < row.num_units) {
        work.shadow(i, keys, values);
      } else {
        work.tile(row.tile + i - row.num_units, feed.readable(), keys, values);
      }
      feed.next();
    }
    lay_down<T>(s, work.acc, a.rows_in_use);
    const bool whole = row.begin >= begin && row.end <= end;
    float* partial = nullptr;
    if (!whole) {
      const int which = begin > row.begin ? 0 : 1;
      partial = a.partials + (2 * static_cast<std::int64_t>(blockIdx.x) + which) *
                                 partial_floats(T::kRows, T::kHeadDim);
      shared[num_shared++] = row;
    }
    store_share<T>(a, s, row, partial, a.rows_in_use);
    if (row.end >= end) break;
    row = find_row(a, row.end, row.request);
  }

  if (num_shared == 0) return;
  sync_workers<T>();
  if (threadIdx.x == 0) {
    // For all threads of the block: their writes are behind the barrier.
    __threadfence();
    for (int i = 0; i < num_shared; ++i) {
      const ListRow& r = shared[i];
      const int first = shares.of(r.begin);
      const int parts = shares.of(r.end - 1) - first + 1;
      // One counter a row; rows are told apart by the block that holds their first unit, and of
      // the rows that begin in a block only the last is shared.
      const int before = atomicAdd(a.arrivals + first, 1);
      s.last[i] = before == parts - 1 ? 1 : 0;
      if (s.last[i] != 0) a.arrivals[first] = 0;
    }
    __threadfence();
  }
  sync_workers<T>();
  for (int i = 0; i < num_shared; ++i) {
    if (s.last[i] != 0) merge_blocks<T>(a, s, shared[i], shares, a.rows_in_use);
  }
}

}  // namespace bitdecoding::cuda
