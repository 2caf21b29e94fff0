// SPDX-License-Identifier: Apache-2.0
// The work of one block of threads in fp4 arithmetic: eight query rows, the tiles of a part and the
// BF16 rows. Sums of values stay in registers.
#pragma once

#include <cstdint>

#include "any/fp4_rows.cuh"
#include "numeric/bf16.h"

namespace bitdecoding::cuda {

struct TilePlace {
  const std::uint8_t* bytes;  // null: a page outside the pool, which nobody sees
  int begin;                  // position of the first token
};

template <Format kFormat, int kHeadDim>
class Fp4Attend {
 public:
  using Tile = Fp4Tile<kFormat, kHeadDim>;
  using Queries = Fp4Queries<kFormat, kHeadDim>;
  static constexpr int kItems = kHeadDim * kFp4Rows / kFp4Threads;  // sums of values a thread
  static constexpr int kBlock = 16;                                 // probabilities under a scale
  static constexpr int kBlocks = kTileTokens / kBlock;
  static constexpr int kRowPitch = kHeadDim + 1;
  static constexpr int kPart = kFp4Rows * (kHeadDim + 2);  // numbers of a part in the workspace

  struct Shared {
    Queries queries;
    Tile tile;
    alignas(16) std::uint8_t p[kFp4Rows][kTileTokens];  // twice the values of the codes
    float p_scale[kFp4Rows][kBlocks];                   // negative: the row sees nothing of it
    double weight[kFp4Rows][kUnitRows];                 // of BF16 rows
    double alpha[kFp4Rows];
    double top[kFp4Rows], sum[kFp4Rows];            // of the pages
    double bf16_top[kFp4Rows], bf16_sum[kFp4Rows];  // of the BF16 rows
    double halves[2][kFp4Rows];
    Fp4Weights weights[kFp4Rows];
    unsigned long long spans;
  };
  static_assert(kUnitRows * kRowPitch <= Tile::kWords, "BF16 rows are laid where tiles are");
  static_assert(kItems * kFp4Threads == kHeadDim * kFp4Rows);

  __device__ Fp4Attend(const Fp4Args& args, const Fp4Block& block, Shared& shared)
      : a_(args),
        block_(block),
        s_(shared),
        units_(args.decode.plan.units +
               static_cast<std::int64_t>(block.request) * args.decode.plan.unit_stride) {
    s_.queries.load(a_, block_);
    clear(sums_);
    clear(bf16_sums_);
    if (threadIdx.x < kFp4Rows) {
      s_.top[threadIdx.x] = s_.bf16_top[threadIdx.x] = -INFINITY;
      s_.sum[threadIdx.x] = s_.bf16_sum[threadIdx.x] = 0;
    }
    __syncthreads();
  }

  // Of the tiles of a part: the rows' maxima, into Shared::top.
  __device__ void find_maxima(int part) {
    double top[2] = {-INFINITY, -INFINITY};
    for_tiles(part, false, [&](const TilePlace& place) {
      s_.tile.load_keys(place.bytes, outer_of(a_.decode.key_outer, block_.head));
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        double score = 0;
        if (score_of(place, first_row() + i, &score)) {
          top[i] = poisoned_max(top[i], isfinite(score) ? score : NAN);
        }
      }
      __syncthreads();
    });
    reduce(
        top, [](double x, double y) { return poisoned_max(x, y); }, s_.top);
  }

  // Of the same tiles, with the rows' maxima over all parts in Shared::top.
  __device__ void add_tiles(int part) {
    double sum[2] = {};
    for_tiles(part, true, [&](const TilePlace& place) {
      s_.tile.load_keys(place.bytes, outer_of(a_.decode.key_outer, block_.head));
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[i] += put_probability(place, first_row() + i);
      __syncthreads();
      s_.tile.load_values(place.bytes, outer_of(a_.decode.value_outer, block_.head));
      __syncthreads();
      add_values();
      __syncthreads();
    });
    // A row with a score that is no number has no probabilities.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (isnan(s_.top[first_row() + i])) sum[i] = NAN;
    }
    reduce(
        sum, [](double x, double y) { return x + y; }, s_.sum);
  }

  __device__ void add_bf16_rows() {
    double top = -INFINITY;  // of the warp's row
    double sum = 0;
    for (int u = 0; u < block_.r.num_units; ++u) {
      const ShadowUnit unit = units_[u];
      stage(unit, 0);
      weigh(unit, &top, &sum);
      __syncthreads();
      stage(unit, 1);
      for_items([&](int i, int row, int dim) {
        double x = bf16_sums_[i] * s_.alpha[row];
        for (int k = 0; k < kUnitRows; ++k) {
          // Rows outside the span may hold anything.
          const double w = s_.weight[row][k];
          if (w != 0) x = fma(w, static_cast<double>(staged(k, dim)), x);
        }
        bf16_sums_[i] = x;
      });
      __syncthreads();
    }
    if (threadIdx.x % 32 == 0) {
      s_.bf16_top[threadIdx.x / 32] = top;
      s_.bf16_sum[threadIdx.x / 32] = isnan(top) ? NAN : sum;
    }
    __syncthreads();
  }

  __device__ void store_maxima(double* out) const {
    if (threadIdx.x < kFp4Rows) out[threadIdx.x] = s_.top[threadIdx.x];
  }
  __device__ void load_maxima(const double* parts) {
    if (threadIdx.x < kFp4Rows) {
      double top = -INFINITY;
      for (int k = 0; k < a_.splits; ++k) {
        top = poisoned_max(top, parts[k * kFp4Rows + threadIdx.x]);
      }
      s_.top[threadIdx.x] = top;
    }
    __syncthreads();
  }

  // A part: [row][sums of values, maximum, sum].
  __device__ void store_part(double* out, bool bf16) const {
    for_items([&](int i, int row, int dim) {
      out[row * (kHeadDim + 2) + dim] = bf16 ? bf16_sums_[i] : sums_[i];
    });
    if (threadIdx.x < kFp4Rows) {
      double* end = out + threadIdx.x * (kHeadDim + 2) + kHeadDim;
      end[0] = bf16 ? s_.bf16_top[threadIdx.x] : s_.top[threadIdx.x];
      end[1] = bf16 ? s_.bf16_sum[threadIdx.x] : s_.sum[threadIdx.x];
    }
  }
  // All parts but the last are of pages and have one maximum.
  __device__ void load_parts(const double* parts) {
    for_items([&](int i, int row, int dim) {
      const double* at = parts + row * (kHeadDim + 2) + dim;
      for (int k = 0; k < a_.splits; ++k) sums_[i] += at[k * kPart];
      bf16_sums_[i] = at[a_.splits * kPart];
    });
    if (threadIdx.x < kFp4Rows) {
      const double* end = parts + threadIdx.x * (kHeadDim + 2) + kHeadDim;
      s_.top[threadIdx.x] = end[0];
      for (int k = 0; k < a_.splits; ++k) s_.sum[threadIdx.x] += end[k * kPart + 1];
      s_.bf16_top[threadIdx.x] = end[a_.splits * kPart];
      s_.bf16_sum[threadIdx.x] = end[a_.splits * kPart + 1];
    }
    __syncthreads();
  }

  __device__ void store_result() {
    const DecodeArgs& d = a_.decode;
    if (threadIdx.x < kFp4Rows) {
      const int row = static_cast<int>(threadIdx.x);
      s_.weights[row] =
          Fp4Weights::of(a_, s_.queries.view[row], block_.q_head(a_, row), s_.top[row], s_.sum[row],
                         s_.bf16_top[row], s_.bf16_sum[row]);
    }
    __syncthreads();
    for_items([&](int i, int row, int dim) {
      const std::int64_t token = block_.token(a_, row);
      if (token >= block_.r.query_len) return;
      const int q_head = block_.q_head(a_, row);
      const Fp4Weights& w = s_.weights[row];
      const std::int64_t out_row = block_.r.query_begin + token;
      store_element(d.output, d.output_dtype,
                    out_row * d.output_stride_token + q_head * d.output_stride_head + dim,
                    static_cast<float>(w.paged * sums_[i] + w.bf16 * bf16_sums_[i]));
      if (dim == 0 && d.lse != nullptr) {
        d.lse[out_row * d.num_q_heads + q_head] = static_cast<float>(w.lse);
      }
    });
  }

 private:
  // Scores: lanes are tokens of a tile, two warps a pair of rows. Sums: neighbours are channels.
  __device__ static int first_row() { return threadIdx.x / kTileTokens * 2; }
  __device__ static int token() { return threadIdx.x % kTileTokens; }
  static_assert(kFp4Threads / kTileTokens * 2 == kFp4Rows);

  __device__ static void clear(double (&sums)[kItems]) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) sums[i] = 0;
  }
  template <class Body>
  __device__ static void for_items(Body body) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = static_cast<int>(threadIdx.x) + i * kFp4Threads;
      body(i, item / kHeadDim, item % kHeadDim);
    }
  }

  // The part's tiles that lie in the pool, one after the other, with Shared::spans filled. Others
  // are counted in one of the two walks.
  template <class Body>
  __device__ void for_tiles(int part, bool counts, Body body) {
    const std::int64_t n = num_tiles(block_.r, a_.decode.window_left);
    const int first = first_tile(block_.r, a_.decode.window_left);
    const int end = first + static_cast<int>(n * (part + 1) / a_.splits);
    for (int t = first + static_cast<int>(n * part / a_.splits); t < end; ++t) {
      const TilePlace place = find(t, counts);
      if (place.bytes == nullptr) continue;
      if (threadIdx.x == 0) s_.spans = 0;
      __syncthreads();
      for (int u = threadIdx.x; u < block_.r.num_units; u += kFp4Threads) {
        const int low = max(units_[u].begin - place.begin, 0);
        const int high = min(units_[u].end - place.begin, kTileTokens);
        if (low < high) atomicOr(&s_.spans, (~0ULL >> (kTileTokens - (high - low))) << low);
      }
      body(place);
    }
  }
  __device__ TilePlace find(int tile, bool counts) const {
    const PlanView& plan = a_.decode.plan;
    const int slot = tile / plan.tiles_per_page;
    const int page =
        slot < plan.page_stride ? plan.pages[block_.request * plan.page_stride + slot] : -1;
    if (page < 0 || page >= plan.num_pages) {
      if (counts && threadIdx.x == 0) atomicAdd(plan.bad_pages, 1ULL);
      return {nullptr, 0};
    }
    return {a_.decode.pages + page * a_.decode.stride_page + block_.head * a_.decode.stride_head +
                static_cast<std::int64_t>(tile - slot * plan.tiles_per_page) * Tile::kParts.bytes,
            tile * kTileTokens};
  }

  // False when the row does not read the thread's token from the tile.
  __device__ bool score_of(const TilePlace& place, int row, double* score) const {
    const Fp4View& view = s_.queries.view[row];
    const int position = place.begin + token();
    const bool in_span = ((s_.spans >> token()) & 1U) != 0;
    if (!view.sees(position) || (in_span && view.takes_bf16(position))) return false;
    *score = fp4_score(a_, s_.queries.dot(s_.tile, row, token()));
    return true;
  }

  // The thread's token of the tile, quantized with the fifteen others of its block; returns c * P.
  __device__ double put_probability(const TilePlace& place, int row) {
    double score = 0;
    const bool seen = score_of(place, row, &score);
    const float cp = seen ? a_.c * static_cast<float>(exp(score - s_.top[row])) : 0.0F;
    float most = cp;
#pragma unroll
    for (int step = 1; step < kBlock; step *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, step));
    }
    const unsigned any = __ballot_sync(0xFFFFFFFFU, seen);
    // The rule looks at the block's maximum alone.
    const float scale = decode_e4m3(ProbabilityRule{a_.c, a_.tau}.choose(&most, 1));
    const int twice = scale == 0.0F ? 0 : twice_value(encode_e2m1(cp / scale));
    s_.p[row][token()] = static_cast<std::uint8_t>(twice);
    if (token() % kBlock == 0) {
      const bool block_seen = (any & (0xFFFFU << (threadIdx.x & 16U))) != 0;
      s_.p_scale[row][token() / kBlock] = block_seen ? scale : -1.0F;
    }
    return 0.5 * twice * scale;
  }

  __device__ void add_values() {
    for_items([&](int i, int row, int dim) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float scale = s_.p_scale[row][block];
        if (scale < 0.0F) continue;  // the values may be anything
        std::uint32_t value[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          value[k] = s_.tile.words[dim * Tile::kValuePitch + 4 * block + k];
        }
        const int n =
            dot16(value, reinterpret_cast<const std::uint32_t*>(&s_.p[row][block * kBlock]));
        const double value_scale = s_.tile.scales[block * kBlock / Tile::kBlock * kHeadDim + dim];
        sums_[i] = fma(n, 0.25 * scale * value_scale, sums_[i]);
      }
    });
  }

  // Two numbers a thread, of first_row() and the next, over the row's 64 threads.
  template <class Combine>
  __device__ void reduce(const double (&x)[2], Combine combine, double* out) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      double y = x[i];
      for (int step = 1; step < 32; step *= 2) {
        y = combine(y, __shfl_xor_sync(0xFFFFFFFFU, y, step));
      }
      if (threadIdx.x % 32 == 0) s_.halves[threadIdx.x / 32 % 2][first_row() + i] = y;
    }
    __syncthreads();
    if (threadIdx.x < kFp4Rows) {
      out[threadIdx.x] = combine(s_.halves[0][threadIdx.x], s_.halves[1][threadIdx.x]);
    }
    __syncthreads();
  }

  __device__ float& staged(int row, int dim) {
    return reinterpret_cast<float*>(s_.tile.words)[row * kRowPitch + dim];
  }
  // Sixteen BF16 rows of one side.
  __device__ void stage(const ShadowUnit& unit, int side) {
    const std::int64_t first =
        (static_cast<std::int64_t>(unit.slot) * a_.decode.num_kv_heads + block_.head) * 2 + side;
    const std::uint16_t* rows =
        a_.decode.shadow +
        (first * a_.decode.group_tokens + unit.row / kUnitRows * kUnitRows) * kHeadDim;
    for (int i = threadIdx.x; i < kUnitRows * kHeadDim; i += kFp4Threads) {
      staged(i / kHeadDim, i % kHeadDim) = decode_bf16(rows[i]);
    }
    __syncthreads();
  }
  // One warp a query row, two lanes a BF16 row: weights relative to a maximum that may rise.
  __device__ void weigh(const ShadowUnit& unit, double* top, double* sum) {
    const int row = threadIdx.x / 32;
    const int k = threadIdx.x % kUnitRows;
    const int half = threadIdx.x % 32 / kUnitRows * (kHeadDim / 2);
    double product = 0;
    for (int dim = half; dim < half + kHeadDim / 2; ++dim) {
      product = fma(static_cast<double>(s_.queries.plain[row][dim]),
                    static_cast<double>(staged(k, dim)), product);
    }
    product += __shfl_xor_sync(0xFFFFFFFFU, product, kUnitRows);
    const Fp4View& view = s_.queries.view[row];
    const int position = unit.begin + k - unit.row % kUnitRows;
    const bool seen = position >= unit.begin && position < unit.end && view.sees(position) &&
                      view.takes_bf16(position);
    const double score = seen ? fp4_score(a_, product) : -INFINITY;
    double most = seen && !isfinite(score) ? NAN : score;
    for (int step = 1; step < kUnitRows; step *= 2) {
      most = poisoned_max(most, __shfl_xor_sync(0xFFFFFFFFU, most, step));
    }
    most = poisoned_max(most, *top);
    const double weight = seen ? exp(score - most) : 0;
    const double alpha = *top == -INFINITY ? 0 : exp(*top - most);
    double added = weight;
    for (int step = 1; step < kUnitRows; step *= 2) {
      added += __shfl_xor_sync(0xFFFFFFFFU, added, step);
    }
    *sum = *sum * alpha + added;
    *top = most;
    s_.weight[row][k] = weight;
    s_.alpha[row] = alpha;
  }

  const Fp4Args& a_;
  const Fp4Block& block_;
  Shared& s_;
  const ShadowUnit* const units_;
  double sums_[kItems], bf16_sums_[kItems];
};

}  // namespace bitdecoding::cuda
