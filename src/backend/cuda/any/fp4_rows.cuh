// SPDX-License-Identifier: Apache-2.0
// The query rows of a block of threads in fp4 arithmetic: what they see, their codes, their scores.
#pragma once

#include <cstdint>

#include "any/fp4_tile.cuh"
#include "common/fp4.h"
#include "common/rotate.cuh"
#include "common/tensor.cuh"
#include "scale/probability.h"
#include "transform/two_term.h"

namespace bitdecoding::cuda {

inline constexpr int kFp4Threads = 32 * kFp4Rows;

// Which block of query rows a block of threads works on.
struct Fp4Block {
  int request, head, first_row;
  Request r;

  __device__ Fp4Block(const Fp4Args& a, int index) {
    const int heads = a.decode.num_kv_heads * a.row_blocks;
    request = index / heads;
    head = index % heads / a.row_blocks;
    first_row = index % a.row_blocks * kFp4Rows;
    r = a.decode.plan.requests[request];
  }
  // Prefilled requests attend elsewhere.
  __device__ bool exists(const Fp4Args& a) const {
    return r.query_len <= kMaxDecodeQueries && first_row < r.query_len * a.decode.group;
  }
  __device__ int token(const Fp4Args& a, int row) const {
    return (first_row + row) / a.decode.group;
  }
  __device__ int q_head(const Fp4Args& a, int row) const {
    return head * a.decode.group + (first_row + row) % a.decode.group;
  }
};

// What a query row sees, and which of it as BF16: positions of a span before sink_end or from
// `tail` on. Rows that do not exist see nothing.
struct Fp4View {
  std::int32_t first, last, sink_end, tail;

  __device__ static Fp4View of(const Fp4Args& a, const Fp4Block& block, int row) {
    Fp4View view{0, -1, 0, 0};
    const int token = block.token(a, row);
    const int q = block.r.seq_len - block.r.query_len + token;
    if (token >= block.r.query_len || q < 0) return view;
    view.last = q;
    view.first = a.decode.window_left < 0 ? 0 : max(q - a.decode.window_left, 0);
    if (a.decode.plan.reproducible != 0) {
      view.sink_end = a.decode.plan.sink_tokens;
      view.tail = tail_begin(a.decode.plan, q + 1);
    }
    return view;
  }
  __device__ bool sees(int position) const { return position >= first && position <= last; }
  __device__ bool takes_bf16(int position) const { return position < sink_end || position >= tail; }
};

// The larger of two, or NaN when either is.
__device__ inline double poisoned_max(double a, double b) { return isnan(a) || a > b ? a : b; }

template <Format kFormat, int kHeadDim>
struct Fp4Queries {
  static constexpr int kBlocks = kHeadDim / kQueryBlock;
  float plain[kFp4Rows][kHeadDim];
  float rotated[kFp4Rows][kHeadDim];
  alignas(16) std::uint32_t codes[kFp4Rows][2][kHeadDim / 4];  // twice the values
  double scales[kFp4Rows][2][kBlocks];                         // half of them
  double shift_dot[kFp4Rows];
  Fp4View view[kFp4Rows];

  // One warp a row.
  __device__ void load(const Fp4Args& a, const Fp4Block& block) {
    using Row = LaneRow<kHeadDim>;
    const DecodeArgs& d = a.decode;
    const int row = threadIdx.x / 32;
    const int token = block.token(a, row);
    const bool exists = token < block.r.query_len;
    const std::int64_t base = (block.r.query_begin + token) * d.query_stride_token +
                              block.q_head(a, row) * d.query_stride_head;
    Row lanes;
    double dot = 0;
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
      for (int e = 0; e < Row::kEach; ++e) {
        const int dim = Row::dim(part, e);
        const float x = exists ? load_element(d.query, d.query_dtype, base + dim) : 0.0F;
        const float shift =
            d.key_shift == nullptr ? 0.0F : d.key_shift[block.head * kHeadDim + dim];
        // Codes hold no NaN: a query that is not finite shows through its sum.
        dot += isfinite(x) ? double{x} * double{shift} : NAN;
        plain[row][dim] = lanes.x[part][e] = x;
      }
    }
    if (d.hadamard) lanes.rotate();
#pragma unroll
    for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
      for (int e = 0; e < Row::kEach; ++e) rotated[row][Row::dim(part, e)] = lanes.x[part][e];
    }
    for (int step = 1; step < 32; step *= 2) dot += __shfl_xor_sync(0xFFFFFFFFU, dot, step);
    if (threadIdx.x % 32 == 0) {
      shift_dot[row] = dot;
      view[row] = Fp4View::of(a, block, row);
    }
    __syncthreads();
    if (threadIdx.x < kFp4Rows * kBlocks) encode(a, threadIdx.x / kBlocks, threadIdx.x % kBlocks);
    __syncthreads();
  }

  // The row's product with a token's key in the tile: exact but for the last additions.
  __device__ double dot(const Fp4Tile<kFormat, kHeadDim>& tile, int row, int token) const {
    using Tile = Fp4Tile<kFormat, kHeadDim>;
    double sum = 0;
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t key[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) key[i] = tile.words[token * Tile::kKeyPitch + 4 * block + i];
      const double scale =
          0.5 * tile.scales[block * kQueryBlock / Tile::kBlock * kTileTokens + token];
#pragma unroll
      for (int term = 0; term < 2; ++term) {
        const int n = dot16(key, codes[row][term] + 4 * block);
        sum = fma(n, scales[row][term][block] * scale, sum);
      }
    }
    return sum + shift_dot[row];
  }

 private:
  __device__ void encode(const Fp4Args& a, int row, int block) {
    const TwoTermBlock terms = quantize_two_term(rotated[row] + block * kQueryBlock, a.query_terms);
    for (int term = 0; term < 2; ++term) {
      scales[row][term][block] = 0.5 * terms.scales[term];
      for (int word = 0; word < kQueryBlock / 4; ++word) {
        std::uint32_t packed = 0;
        for (int i = 0; i < 4; ++i) {
          const auto twice =
              static_cast<std::uint8_t>(twice_value(terms.codes[term][4 * word + i]));
          packed |= static_cast<std::uint32_t>(twice) << (8 * i);
        }
        codes[row][term][block * kQueryBlock / 4 + word] = packed;
      }
    }
  }
};

__device__ inline double fp4_score(const Fp4Args& a, double product) {
  const double score = static_cast<double>(a.decode.sm_scale) * product;
  return a.decode.softcap == 0.0F ? score : a.decode.softcap * tanh(score * a.inverse_softcap);
}

// A row's result from its FP4 part, whose probabilities are relative to its own maximum and times
// c, and its BF16 part: factors of their sums of values.
struct Fp4Weights {
  double paged, bf16, lse;

  __device__ static Fp4Weights of(const Fp4Args& a, const Fp4View& view, int q_head, double top,
                                  double sum, double bf16_top, double bf16_sum) {
    const Fp4Weights nothing{0, 0, -INFINITY};
    if (view.last < 0) return nothing;  // not even the learned sink
    const double paged_lse = sum == 0 ? -INFINITY : top + (log(sum) - a.log_c);
    const double bf16_lse = bf16_sum == 0 ? -INFINITY : bf16_top + log(bf16_sum);
    const double sink = a.decode.attn_sink == nullptr ? -INFINITY : a.decode.attn_sink[q_head];
    const double most = poisoned_max(poisoned_max(paged_lse, bf16_lse), sink);
    if (most == -INFINITY) return nothing;
    const double lse = most + log(exp(paged_lse - most) + exp(bf16_lse - most) + exp(sink - most));
    return {sum == 0 ? 0 : exp(top - a.log_c - lse), bf16_sum == 0 ? 0 : exp(bf16_top - lse), lse};
  }
};

}  // namespace bitdecoding::cuda
