// SPDX-License-Identifier: Apache-2.0
// Quantize and write: one block of threads a (group of tokens, KV head, side). Compiled without
// fused multiply-add: codes and scales are the reference's, bit for bit.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "any/block.cuh"
#include "common/dependent.cuh"
#include "common/error.h"
#include "common/for_shape.h"
#include "common/mma.cuh"
#include "common/rotate.cuh"
#include "common/tensor.cuh"
#include "common/write.h"
#include "numeric/bf16.h"
#include "page/layout.h"
#include "scale/rules.h"

namespace bitdecoding::cuda {
namespace {

struct Tally {
  unsigned non_finite = 0, saturated = 0, flushed = 0;
};

// Pairs of BF16 numbers, low half first, as they are stored everywhere: what is not finite is zero
// and counted.
template <int kPairs>
__device__ void make_storable(std::uint32_t (&pairs)[kPairs], Tally* tally) {
  std::uint32_t found = 0;
#pragma unroll
  for (const std::uint32_t pair : pairs) {
    found |= ((pair & 0x7F807F80U) + 0x00800080U) & 0x80008000U;  // exponents of all ones
  }
  if (found == 0) return;
#pragma unroll
  for (std::uint32_t& pair : pairs) {
    const std::uint32_t bad = ((pair & 0x7F807F80U) + 0x00800080U) & 0x80008000U;
    tally->non_finite += __popc(bad);
    pair &= ~((bad >> 15) * 0xFFFFU);
  }
}

__device__ std::uint32_t pair_of(float low, float high) {
  return encode_bf16(low) | (static_cast<std::uint32_t>(encode_bf16(high)) << 16);
}
__device__ float low_of(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high_of(std::uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000U); }

// Two halves of an FP16 pair as BF16.
__device__ std::uint32_t from_f16(std::uint32_t pair) {
  const auto halves = *reinterpret_cast<const __half2*>(&pair);
  return pair_of(__low2float(halves), __high2float(halves));
}

// 2 * kPairs neighbouring elements, rounded to BF16.
template <int kPairs>
__device__ void load_run(const Tensor& tensor, std::int64_t at, std::uint32_t (&pairs)[kPairs]) {
  if (!tensor.vectors) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i] = pair_of(load_element(tensor.data, tensor.dtype, at + 2 * i),
                         load_element(tensor.data, tensor.dtype, at + 2 * i + 1));
    }
    return;
  }
  const auto* from =
      reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(tensor.data) + at);
#pragma unroll
  for (int i = 0; i < kPairs / 4; ++i) {
    const uint4 four = from[i];
    pairs[4 * i] = four.x;
    pairs[4 * i + 1] = four.y;
    pairs[4 * i + 2] = four.z;
    pairs[4 * i + 3] = four.w;
  }
  if (tensor.dtype == DType::kBf16) return;
#pragma unroll
  for (std::uint32_t& pair : pairs) pair = from_f16(pair);
}

template <Format kFormat>
__device__ std::uint8_t choose(ScaleRule rule, const float* x, float outer) {
  constexpr int n = scale_block(kFormat);
  using Block = FastBlock<n>;
  if constexpr (kFormat == Format::kMxfp4) {
    return rule == ScaleRule::kMxfp4Floor ? Mxfp4Floor::choose<Block>(x, n, outer)
                                          : Mxfp4Search::choose<Block>(x, n, outer);
  }
  switch (rule) {
    case ScaleRule::kAmax6:
      return Amax6::choose<Block>(x, n, outer);
    case ScaleRule::kFourSix:
      return FourSix::choose<Block>(x, n, outer);
    default:
      return CodeSearch::choose<Block>(x, n, outer);
  }
}

// One block of values: codes packed eight to a word, scale returned.
template <Format kFormat>
__device__ std::uint8_t quantize(ScaleRule rule, const float* x, float outer, std::uint32_t* words,
                                 Tally* tally) {
  constexpr int n = scale_block(kFormat);
  const std::uint8_t scale = choose<kFormat>(rule, x, outer);
  const float unit = decode_scale(kFormat, scale);
  std::uint32_t bytes[n / 4];
  FastBlock<n>::encode(x, unit * outer, bytes);
#pragma unroll
  for (int w = 0; w < n / 8; ++w) words[w] = pack_codes(bytes[2 * w], bytes[2 * w + 1]);
  // block_saturates: whatever is not a number is too large as well.
  if (!(FastBlock<n>::largest(x) <= largest_block_value(kFormat, outer))) ++tally->saturated;
  if (unit == 0.0F && FastBlock<n>::amax(x, n) > 0.0F) ++tally->flushed;
  return scale;
}

// A group of one KV head. A thread holds what it quantizes: one scale block of one row of K, or the
// group's rows of two channels of V. Neither goes through shared memory.
template <Format kFormat, int kHeadDim>
struct GroupWriter {
  static constexpr int kGroup = group_tokens(kFormat);
  static constexpr int kBlock = scale_block(kFormat);
  static constexpr int kWords = kBlock / 8;
  static constexpr int kPart = hadamard_block(kHeadDim);
  static_assert(kPart % kBlock == 0 && kGroup == kBlock);
  // Blocks of a row, with the columns that pad it.
  static constexpr int kRowBlocks = layout::key_column_blocks(kHeadDim) * 64 / kBlock;
  static constexpr int kThreads = kHeadDim <= 64 ? 32 : kHeadDim <= 128 ? 64 : 128;
  static constexpr layout::TileParts kParts = layout::tile_parts(kFormat, kHeadDim);

  const WriteArgs& a;
  const Write w;
  const int head;
  Tally tally;

  __device__ std::uint8_t* tile() const {
    const int row = w.group * kGroup;
    return a.layer.pages + w.page * a.layer.stride_page + head * a.layer.stride_head +
           static_cast<std::int64_t>(row / kTileTokens) * kParts.bytes;
  }
  __device__ int tile_row(int row) const { return w.group * kGroup % kTileTokens + row; }
  __device__ std::uint16_t* shadow(int side, int row) const {
    return a.layer.shadow +
           (((static_cast<std::int64_t>(w.slot) * a.layer.num_kv_heads + head) * 2 + side) *
                kGroup +
            row) *
               kHeadDim;
  }

  // ---- K ----
  __device__ void keys() {
    const int tasks = w.num_rows * kRowBlocks;
    for (int base = 0; base < tasks; base += kThreads) {
      if (base + static_cast<int>(threadIdx.x & ~31U) >= tasks) break;
      const int i = base + static_cast<int>(threadIdx.x);
      const int row = w.first_row + i / kRowBlocks;
      const int dim = i % kRowBlocks * kBlock;
      float x[kBlock] = {};
      if (i < tasks && dim < kHeadDim) load_key(row, dim, x);
      if (a.layer.hadamard) rotate_part<kPart>(x);
      if (i < tasks) store_key(row, dim, x);
    }
  }
  __device__ void load_key(int row, int dim, float (&x)[kBlock]) {
    std::uint32_t pairs[kBlock / 2];
    load_run(a.key,
             (w.source + row - w.first_row) * a.key.stride_token + head * a.key.stride_head + dim,
             pairs);
    make_storable(pairs, &tally);
    if (w.slot >= 0) {
      auto* to = reinterpret_cast<uint4*>(shadow(0, row) + dim);
#pragma unroll
      for (int i = 0; i < kBlock / 8; ++i) {
        to[i] = {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]};
      }
    }
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) {
      x[2 * i] = low_of(pairs[i]);
      x[2 * i + 1] = high_of(pairs[i]);
    }
    if (a.layer.key_shift == nullptr) return;
    const float* shift = a.layer.key_shift + head * kHeadDim + dim;
#pragma unroll
    for (int e = 0; e < kBlock; ++e) x[e] -= shift[e];
  }
  // A block of a row is whole words of one fragment row; its neighbours belong to other rows.
  __device__ void store_key(int row, int dim, const float (&x)[kBlock]) {
    std::uint8_t* bytes = tile();
    std::uint32_t words[kWords] = {};
    std::uint8_t scale = 0;
    if (dim < kHeadDim) {
      scale =
          quantize<kFormat>(a.layer.key_rule, x, outer_of(a.layer.key_outer, head), words, &tally);
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const std::int64_t at =
          layout::key_code(kFormat, kOrder, kHeadDim, tile_row(row), dim + 8 * word).byte;
      *reinterpret_cast<std::uint32_t*>(bytes + at) = words[word];
    }
    bytes[layout::key_scale(kFormat, kOrder, kHeadDim, tile_row(row), dim)] = scale;
  }

  // ---- V ----
  __device__ void values() {
    for (int dim = 2 * static_cast<int>(threadIdx.x); dim < kHeadDim; dim += 2 * kThreads) {
      std::uint32_t pairs[kGroup];
      load_values(dim, pairs);
      if (w.first_row > 0) load_earlier(dim, pairs);
      make_storable(pairs, &tally);
      if (w.slot >= 0) {
#pragma unroll
        for (int row = 0; row < kGroup; ++row) {
          if (is_new(row)) *reinterpret_cast<std::uint32_t*>(shadow(1, row) + dim) = pairs[row];
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[kGroup];
#pragma unroll
        for (int row = 0; row < kGroup; ++row) {
          x[row] = half == 0 ? low_of(pairs[row]) : high_of(pairs[row]);
        }
        store_value(dim + half, x);
      }
    }
  }
  __device__ bool is_new(int row) const {
    return row >= w.first_row && row < w.first_row + w.num_rows;
  }
  // The step's rows; zero for all others. All loads are under way at once.
  __device__ void load_values(int dim, std::uint32_t (&pairs)[kGroup]) const {
    const std::int64_t base =
        (w.source - w.first_row) * a.value.stride_token + head * a.value.stride_head + dim;
    if (!a.value.vectors) {
#pragma unroll
      for (int row = 0; row < kGroup; ++row) {
        const std::int64_t at = base + row * a.value.stride_token;
        pairs[row] = is_new(row) ? pair_of(load_element(a.value.data, a.value.dtype, at),
                                           load_element(a.value.data, a.value.dtype, at + 1))
                                 : 0;
      }
      return;
    }
    const auto* from = static_cast<const std::uint16_t*>(a.value.data);
#pragma unroll
    for (int row = 0; row < kGroup; ++row) {
      const std::uint16_t* at = from + base + row * a.value.stride_token;
      pairs[row] = is_new(row) ? *reinterpret_cast<const std::uint32_t*>(at) : 0;
    }
    if (a.value.dtype == DType::kBf16) return;
#pragma unroll
    for (std::uint32_t& pair : pairs) pair = from_f16(pair);
  }
  // Rows before the step's: from the slot, else from the page's own codes.
  __device__ void load_earlier(int dim, std::uint32_t (&pairs)[kGroup]) const {
    if (w.prefix_in_slot != 0) {
#pragma unroll
      for (int row = 0; row < kGroup; ++row) {
        if (row < w.first_row) {
          pairs[row] = *reinterpret_cast<const std::uint32_t*>(shadow(1, row) + dim);
        }
      }
      return;
    }
    const float outer = outer_of(a.layer.value_outer, head);
#pragma unroll
    for (int row = 0; row < kGroup; ++row) {
      if (row < w.first_row) {
        pairs[row] = stored_pair(tile(), tile_row(row), dim, outer);
      }
    }
  }
  // Not a member, so that the writer itself stays in registers.
  static __device__ __noinline__ std::uint32_t stored_pair(const std::uint8_t* bytes, int row,
                                                           int dim, float outer) {
    float x[2];
    for (int e = 0; e < 2; ++e) {
      const layout::Nibble at = layout::value_code(kFormat, kOrder, kHeadDim, row, dim + e);
      const std::uint8_t scale =
          bytes[layout::value_scale(kFormat, kOrder, kHeadDim, row, dim + e)];
      x[e] = is_corrupt_scale(kFormat, scale) ? NAN
                                              : decode_e2m1(layout::take_code(bytes[at.byte], at)) *
                                                    (decode_scale(kFormat, scale) * outer);
    }
    return pair_of(x[0], x[1]);
  }
  __device__ void store_value(int dim, const float (&x)[kGroup]) {
    std::uint8_t* bytes = tile();
    std::uint32_t words[kWords];
    const std::uint8_t scale = quantize<kFormat>(
        a.layer.value_rule, x, outer_of(a.layer.value_outer, head), words, &tally);
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const std::int64_t at =
          layout::value_code(kFormat, kOrder, kHeadDim, tile_row(8 * word), dim).byte;
      *reinterpret_cast<std::uint32_t*>(bytes + at) = words[word];
    }
    bytes[layout::value_scale(kFormat, kOrder, kHeadDim, tile_row(0), dim)] = scale;
  }

  __device__ void count() const {
    if (a.counters == nullptr) return;
    const auto add = [](std::uint64_t* to, unsigned n) {
      if (n != 0) atomicAdd(reinterpret_cast<unsigned long long*>(to), n);
    };
    add(&a.counters->non_finite, tally.non_finite);
    add(&a.counters->saturated_blocks, tally.saturated);
    add(&a.counters->flushed_blocks, tally.flushed);
    if (head == 0 && blockIdx.z == 1 && threadIdx.x == 0 && w.first_row > 0 &&
        w.prefix_in_slot == 0) {
      add(&a.counters->requantized_prefix, 1);
    }
  }
};

template <Format kFormat, int kHeadDim>
__global__ void __launch_bounds__(GroupWriter<kFormat, kHeadDim>::kThreads)
    write_kernel(const __grid_constant__ WriteArgs a) {
  let_successor_begin();
  const int num_writes = *a.plan.num_writes;
  Write w = a.plan.writes[blockIdx.x];
  wait_for_predecessor();
  for (int i = blockIdx.x; i < num_writes;) {
    GroupWriter<kFormat, kHeadDim> writer{a, w, static_cast<int>(blockIdx.y), {}};
    if (blockIdx.z == 0) {
      writer.keys();
    } else {
      writer.values();
    }
    writer.count();
    i += static_cast<int>(gridDim.x);
    if (i < num_writes) w = a.plan.writes[i];
  }
}

}  // namespace

Status launch_write(const WriteArgs& args, void* stream, bool dependent) {
  const dim3 grid(static_cast<unsigned>(args.plan.max_writes),
                  static_cast<unsigned>(args.layer.num_kv_heads), 2);
  cudaError_t error = cudaSuccess;
  Status status =
      for_shape(args.layer.format, args.layer.head_dim, [&]<Format kFormat, int kDim>() {
        const dim3 block(GroupWriter<kFormat, kDim>::kThreads);
        error = launch(write_kernel<kFormat, kDim>, {grid, block, 0, stream, dependent}, args);
      });
  return status.ok() ? check(error, "launching the cache write") : status;
}

}  // namespace bitdecoding::cuda
