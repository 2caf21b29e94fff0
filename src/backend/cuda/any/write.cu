// SPDX-License-Identifier: Apache-2.0
// Quantize and write: one block of threads a (group of tokens, KV head, side). Compiled without
// fused multiply-add: codes and scales are the reference's, bit for bit.
#include <cuda_bf16.h>

#include "any/block.cuh"
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

constexpr int kThreads = 128;

struct Tally {
  unsigned non_finite = 0, saturated = 0, flushed = 0;
};

// As it is stored everywhere: rounded to BF16; what is not finite is zero and counted.
__device__ float storable(float x, Tally* tally) {
  const float rounded = decode_bf16(encode_bf16(x));
  if (isfinite(rounded)) return rounded;
  ++tally->non_finite;
  return 0.0F;
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

// One block of values: codes packed eight to a word in the layout's order, scale returned.
template <Format kFormat>
__device__ std::uint8_t quantize(ScaleRule rule, FragmentOrder order, const float* x, float outer,
                                 std::uint32_t* words, Tally* tally) {
  constexpr int n = scale_block(kFormat);
  const std::uint8_t scale = choose<kFormat>(rule, x, outer);
  const float unit = decode_scale(kFormat, scale);
  const float whole = unit * outer;
  const float inverse = whole == 0.0F ? 0.0F : __frcp_rn(whole);
#pragma unroll
  for (int w = 0; w < n / 8; ++w) {
    std::uint32_t word = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const layout::Nibble at = layout::fragment_code(order, 0, c);
      const std::uint32_t code =
          whole == 0.0F ? 0U : FastBlock<n>::encode(x[8 * w + c], whole, inverse);
      word |= static_cast<std::uint32_t>(layout::put_code(0, at, static_cast<std::uint8_t>(code)))
              << (8 * static_cast<int>(at.byte));
    }
    words[w] = word;
  }
  const float amax = block_amax(x, n);
  if (block_saturates(kFormat, x, n, outer)) ++tally->saturated;
  if (amax > 0.0F && unit == 0.0F) ++tally->flushed;
  return scale;
}

template <Format kFormat, int kHeadDim>
struct GroupWriter {
  static constexpr int kGroup = group_tokens(kFormat);
  static constexpr int kBlock = scale_block(kFormat);
  static constexpr int kPitch = kHeadDim + 1;
  static constexpr int kWords = kBlock / 8;
  static constexpr layout::TileParts kParts = layout::tile_parts(kFormat, kHeadDim);

  const WriteArgs& a;
  const Write& w;
  const int head;
  float (&rows)[kGroup][kPitch];  // of K, then of V
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

  // The step's rows of one side, rounded to BF16; into the slot, too.
  __device__ void load_rows(int side) {
    const Tensor& tensor = side == 0 ? a.key : a.value;
    const float* shift = side == 0 ? a.layer.key_shift : nullptr;
    const int count = w.num_rows * kHeadDim;
    constexpr int kBatch = 8;  // loads under way at once
    for (int base = threadIdx.x; base < count; base += kBatch * kThreads) {
      float raw[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = base + j * kThreads;
        raw[j] = i >= count ? 0.0F
                            : load_element(tensor.data, tensor.dtype,
                                           (w.source + i / kHeadDim) * tensor.stride_token +
                                               head * tensor.stride_head + i % kHeadDim);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = base + j * kThreads;
        if (i >= count) break;
        const int row = w.first_row + i / kHeadDim;
        const int dim = i % kHeadDim;
        const float x = storable(raw[j], &tally);
        rows[row][dim] = shift == nullptr ? x : x - shift[head * kHeadDim + dim];
        if (w.slot >= 0) shadow(side, row)[dim] = encode_bf16(x);
      }
    }
  }

  // V's rows before first_row: from the slot, else from the page's own codes; rows that do not
  // exist yet are zero.
  __device__ void load_rest() {
    for (int i = threadIdx.x; i < kGroup * kHeadDim; i += kThreads) {
      const int row = i / kHeadDim;
      const int dim = i % kHeadDim;
      if (row >= w.first_row && row < w.first_row + w.num_rows) continue;
      float x = 0.0F;
      if (row < w.first_row) {
        x = w.prefix_in_slot != 0 ? decode_bf16(shadow(1, row)[dim]) : stored_value(row, dim);
        x = storable(x, &tally);
      }
      rows[row][dim] = x;
    }
  }
  __device__ float stored_value(int row, int dim) const {
    const std::uint8_t* bytes = tile();
    const layout::Nibble at =
        layout::value_code(kFormat, a.layer.order, kHeadDim, tile_row(row), dim);
    const std::uint8_t scale =
        bytes[layout::value_scale(kFormat, a.layer.order, kHeadDim, tile_row(row), dim)];
    if (is_corrupt_scale(kFormat, scale)) return NAN;
    return decode_e2m1(layout::take_code(bytes[at.byte], at)) *
           (decode_scale(kFormat, scale) * outer_of(a.layer.value_outer, head));
  }

  // One warp a row.
  __device__ void rotate() {
    using Row = LaneRow<kHeadDim>;
    for (int i = threadIdx.x >> 5; i < w.num_rows; i += kThreads / 32) {
      float* row = rows[w.first_row + i];
      Row lanes;
#pragma unroll
      for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
        for (int e = 0; e < Row::kEach; ++e) lanes.x[part][e] = row[Row::dim(part, e)];
      }
      lanes.rotate();
#pragma unroll
      for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
        for (int e = 0; e < Row::kEach; ++e) row[Row::dim(part, e)] = lanes.x[part][e];
      }
    }
  }

  // A block of a row is whole words of one fragment row; its neighbours belong to other rows.
  __device__ void store_keys() {
    std::uint8_t* bytes = tile();
    const float outer = outer_of(a.layer.key_outer, head);
    constexpr int kBlocks = layout::key_column_blocks(kHeadDim) * 64 / kBlock;
    for (int i = threadIdx.x; i < w.num_rows * kBlocks; i += kThreads) {
      const int row = w.first_row + i % w.num_rows;
      const int dim = i / w.num_rows * kBlock;
      float x[kBlock];
      std::uint32_t words[kWords] = {};
      std::uint8_t scale = 0;
      if (dim < kHeadDim) {
#pragma unroll
        for (int e = 0; e < kBlock; ++e) x[e] = rows[row][dim + e];
        scale = quantize<kFormat>(a.layer.key_rule, a.layer.order, x, outer, words, &tally);
      }
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const std::int64_t at =
            layout::key_code(kFormat, a.layer.order, kHeadDim, tile_row(row), dim + 8 * word).byte;
        *reinterpret_cast<std::uint32_t*>(bytes + at) = words[word];
      }
      bytes[layout::key_scale(kFormat, a.layer.order, kHeadDim, tile_row(row), dim)] = scale;
    }
  }

  __device__ void store_values() {
    std::uint8_t* bytes = tile();
    const float outer = outer_of(a.layer.value_outer, head);
    for (int dim = threadIdx.x; dim < kHeadDim; dim += kThreads) {
      float x[kGroup];
#pragma unroll
      for (int row = 0; row < kGroup; ++row) x[row] = rows[row][dim];
      std::uint32_t words[kWords];
      const std::uint8_t scale =
          quantize<kFormat>(a.layer.value_rule, a.layer.order, x, outer, words, &tally);
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const std::int64_t at =
            layout::value_code(kFormat, a.layer.order, kHeadDim, tile_row(8 * word), dim).byte;
        *reinterpret_cast<std::uint32_t*>(bytes + at) = words[word];
      }
      bytes[layout::value_scale(kFormat, a.layer.order, kHeadDim, tile_row(0), dim)] = scale;
    }
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
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ WriteArgs a) {
  using Writer = GroupWriter<kFormat, kHeadDim>;
  __shared__ float rows[Writer::kGroup][Writer::kPitch];
  const int num_writes = *a.plan.num_writes;
  for (int i = blockIdx.x; i < num_writes; i += gridDim.x) {
    const Write w = a.plan.writes[i];
    Writer writer{a, w, static_cast<int>(blockIdx.y), rows, {}};
    const int side = static_cast<int>(blockIdx.z);
    writer.load_rows(side);
    if (side == 1) writer.load_rest();
    __syncthreads();
    if (side == 0 && a.layer.hadamard) {
      writer.rotate();
      __syncthreads();
    }
    if (side == 0) {
      writer.store_keys();
    } else {
      writer.store_values();
    }
    writer.count();
    __syncthreads();
  }
}

}  // namespace

Status launch_write(const WriteArgs& args, void* stream) {
  if (args.plan.max_writes == 0) return {};
  const dim3 grid(static_cast<unsigned>(args.plan.max_writes),
                  static_cast<unsigned>(args.layer.num_kv_heads), 2);
  Status status =
      for_shape(args.layer.format, args.layer.head_dim, [&]<Format kFormat, int kDim>() {
        write_kernel<kFormat, kDim><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
      });
  return status.ok() ? check(cudaGetLastError(), "launching the cache write") : status;
}

}  // namespace bitdecoding::cuda
