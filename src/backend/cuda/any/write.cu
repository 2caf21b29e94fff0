// Quantize and write: one block of threads a (group of tokens, KV head). Compiled without fused
// multiply-add: codes and scales are the reference's, bit for bit.
#include <cuda_bf16.h>

#include "common/error.h"
#include "common/tensor.cuh"
#include "common/write.h"
#include "numeric/bf16.h"
#include "page/layout.h"
#include "scale/rules.h"
#include "transform/hadamard.h"

namespace bitdecoding::cuda {
namespace {

constexpr int kThreads = 128;

__device__ float outer_of(const std::int8_t* exponents, int head) {
  return exponents == nullptr ? 1.0F : exp2f(static_cast<float>(exponents[head]));
}

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
__device__ std::uint8_t choose(ScaleRule rule, const float* x, int n, float outer) {
  if constexpr (kFormat == Format::kMxfp4) {
    return rule == ScaleRule::kMxfp4Floor ? Mxfp4Floor::choose(x, n, outer)
                                          : Mxfp4Search::choose(x, n, outer);
  }
  switch (rule) {
    case ScaleRule::kAmax6:
      return Amax6::choose(x, n, outer);
    case ScaleRule::kFourSix:
      return FourSix::choose(x, n, outer);
    default:
      return CodeSearch::choose(x, n, outer);
  }
}

// One block of values: codes packed eight to a word in the layout's order, scale returned.
template <Format kFormat>
__device__ std::uint8_t quantize(ScaleRule rule, FragmentOrder order, const float* x, float outer,
                                 std::uint32_t* words, Tally* tally) {
  constexpr int n = scale_block(kFormat);
  const std::uint8_t scale = choose<kFormat>(rule, x, n, outer);
  const float unit = decode_scale(kFormat, scale);
  std::uint8_t codes[n];
  encode_block(x, n, unit * outer, codes);
#pragma unroll
  for (int w = 0; w < n / 8; ++w) {
    std::uint32_t word = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const layout::Nibble at = layout::fragment_code(order, 0, c);
      word |= static_cast<std::uint32_t>(layout::put_code(0, at, codes[8 * w + c]))
              << (8 * static_cast<int>(at.byte));
    }
    words[w] = word;
  }
  const float amax = block_amax(x, n);
  if (!(amax <= largest_block_value(kFormat, outer))) ++tally->saturated;
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
           (((static_cast<std::int64_t>(w.slot) * a.layer.num_kv_heads + head) * 2 + side) * kGroup +
            row) *
               kHeadDim;
  }

  // The step's rows of one side, rounded to BF16; into the slot, too.
  __device__ void load_rows(int side) {
    const Tensor& tensor = side == 0 ? a.key : a.value;
    const float* shift = side == 0 ? a.layer.key_shift : nullptr;
    for (int i = threadIdx.x; i < w.num_rows * kHeadDim; i += kThreads) {
      const int row = w.first_row + i / kHeadDim;
      const int dim = i % kHeadDim;
      const std::int64_t token = w.source + i / kHeadDim;
      const float x =
          storable(load_element(tensor.data, tensor.dtype,
                                token * tensor.stride_token + head * tensor.stride_head + dim),
                   &tally);
      rows[row][dim] = shift == nullptr ? x : x - shift[head * kHeadDim + dim];
      if (w.slot >= 0) shadow(side, row)[dim] = encode_bf16(x);
    }
  }

  // V's rows before first_row: from the slot, else from the page's own codes; rows that do not exist
  // yet are zero.
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

  // One warp a row, lanes hold neighbouring channels: the order of transform/hadamard.h.
  __device__ void rotate() {
    constexpr int kPart = hadamard_block(kHeadDim);
    constexpr int kEach = kPart / 32;
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < w.num_rows; i += kThreads / 32) {
      float* row = rows[w.first_row + i];
      for (int base = 0; base < kHeadDim; base += kPart) {
        float x[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) x[e] = row[base + lane * kEach + e];
#pragma unroll
        for (int stride = 1; stride < kEach; stride *= 2) {
#pragma unroll
          for (int e = 0; e < kEach; ++e) {
            if ((e & stride) != 0) continue;
            const float u = x[e];
            const float v = x[e + stride];
            x[e] = u + v;
            x[e + stride] = u - v;
          }
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
#pragma unroll
          for (int e = 0; e < kEach; ++e) {
            const float other = __shfl_xor_sync(0xFFFFFFFFU, x[e], step);
            x[e] = (lane & step) == 0 ? x[e] + other : other - x[e];
          }
        }
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          row[base + lane * kEach + e] = x[e] * hadamard_scale(kPart);
        }
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
    if (head == 0 && threadIdx.x == 0 && w.first_row > 0 && w.prefix_in_slot == 0) {
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
    writer.load_rows(0);
    __syncthreads();
    if (a.layer.hadamard) writer.rotate();
    __syncthreads();
    writer.store_keys();
    __syncthreads();
    writer.load_rows(1);
    writer.load_rest();
    __syncthreads();
    writer.store_values();
    writer.count();
    __syncthreads();
  }
}

// One tile of one KV head: codes back to numbers, keys rotated back and shifted.
template <Format kFormat, int kHeadDim>
__global__ void __launch_bounds__(256) gather_kernel(const __grid_constant__ GatherArgs a) {
  constexpr layout::TileParts kParts = layout::tile_parts(kFormat, kHeadDim);
  constexpr int kRows = 32;  // of the tile at a time
  __shared__ float rows[kRows][kHeadDim + 1];
  const Request r = a.plan.requests[a.what.request];
  const int head = blockIdx.y;
  const int tile = static_cast<int>(a.what.begin / kTileTokens) + static_cast<int>(blockIdx.x);
  const int page_slot = tile / a.plan.tiles_per_page;
  const int page = a.plan.pages[a.what.request * a.plan.page_stride + page_slot];
  const bool readable = page >= 0 && page < a.plan.num_pages;
  if (!readable && threadIdx.x == 0) atomicAdd(a.plan.bad_pages, 1ULL);
  const std::uint8_t* bytes =
      a.layer.pages + (readable ? page : 0) * a.layer.stride_page + head * a.layer.stride_head +
      static_cast<std::int64_t>(tile - page_slot * a.plan.tiles_per_page) * kParts.bytes;
  const ShadowUnit* units =
      a.plan.units + static_cast<std::int64_t>(a.what.request) * a.plan.unit_stride;
  const int num_units = a.what.with_shadow ? r.num_units : 0;
  for (int side = 0; side < 2; ++side) {
    const float outer = outer_of(side == 0 ? a.layer.key_outer : a.layer.value_outer, head);
    for (int base = 0; base < kTileTokens; base += kRows) {
      for (int i = threadIdx.x; i < kRows * kHeadDim; i += blockDim.x) {
        const int row = base + i / kHeadDim;
        const int dim = i % kHeadDim;
        const layout::Nibble at =
            side == 0 ? layout::key_code(kFormat, a.layer.order, kHeadDim, row, dim)
                      : layout::value_code(kFormat, a.layer.order, kHeadDim, row, dim);
        const std::uint8_t scale =
            bytes[side == 0 ? layout::key_scale(kFormat, a.layer.order, kHeadDim, row, dim)
                            : layout::value_scale(kFormat, a.layer.order, kHeadDim, row, dim)];
        rows[i / kHeadDim][dim] =
            is_corrupt_scale(kFormat, scale)
                ? NAN
                : decode_e2m1(layout::take_code(bytes[at.byte], at)) *
                      (decode_scale(kFormat, scale) * outer);
      }
      __syncthreads();
      constexpr int kPart = hadamard_block(kHeadDim);
      constexpr int kEach = kPart / 32;
      const int lane = threadIdx.x & 31;
      for (int i = threadIdx.x >> 5; i < kRows; i += static_cast<int>(blockDim.x) / 32) {
        const int position = tile * kTileTokens + base + i;
        if (position < a.what.begin || position >= a.what.end) continue;
        int slot = -1;
        int slot_row = 0;
        for (int u = 0; u < num_units; ++u) {
          if (position >= units[u].begin && position < units[u].end) {
            slot = units[u].slot;
            slot_row = units[u].row + position - units[u].begin;
          }
        }
        for (int part = 0; part < kHeadDim; part += kPart) {
          float x[kEach];
#pragma unroll
          for (int e = 0; e < kEach; ++e) x[e] = rows[i][part + lane * kEach + e];
          if (side == 0 && a.layer.hadamard) {
#pragma unroll
            for (int stride = 1; stride < kEach; stride *= 2) {
#pragma unroll
              for (int e = 0; e < kEach; ++e) {
                if ((e & stride) != 0) continue;
                const float u = x[e];
                const float v = x[e + stride];
                x[e] = u + v;
                x[e + stride] = u - v;
              }
            }
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
#pragma unroll
              for (int e = 0; e < kEach; ++e) {
                const float other = __shfl_xor_sync(0xFFFFFFFFU, x[e], step);
                x[e] = (lane & step) == 0 ? x[e] + other : other - x[e];
              }
            }
#pragma unroll
            for (int e = 0; e < kEach; ++e) x[e] *= hadamard_scale(kPart);
          }
#pragma unroll
          for (int e = 0; e < kEach; ++e) {
            const int dim = part + lane * kEach + e;
            if (side == 0 && a.layer.key_shift != nullptr) {
              x[e] += a.layer.key_shift[head * kHeadDim + dim];
            }
            if (slot >= 0) {
              x[e] = decode_bf16(
                  a.layer.shadow[(((static_cast<std::int64_t>(slot) * a.layer.num_kv_heads + head) *
                                       2 +
                                   side) *
                                      group_tokens(kFormat) +
                                  slot_row) *
                                     kHeadDim +
                                 dim]);
            }
            store_element(side == 0 ? a.what.key : a.what.value, a.what.dtype,
                          (position - a.what.begin) * a.what.stride_token +
                              head * a.what.stride_head + dim,
                          readable || slot >= 0 ? x[e] : 0.0F);
          }
        }
      }
      __syncthreads();
    }
  }
}

__global__ void merge_kernel(const __grid_constant__ CudaBackend::Merge m) {
  const std::int64_t row = blockIdx.x;
  const float la = m.lse_a[row];
  const float lb = m.lse_b[row];
  const float top = fmaxf(la, lb);
  // Two empty parts: weights zero, LSE -inf.
  const bool empty = top == -INFINITY;
  const float ea = empty ? 0.0F : expf(la - top);
  const float eb = empty ? 0.0F : expf(lb - top);
  const float sum = ea + eb;
  const float wa = empty ? 0.0F : ea / sum;
  const float wb = empty ? 0.0F : eb / sum;
  for (int d = threadIdx.x; d < m.head_dim; d += blockDim.x) {
    const std::int64_t at = row * m.head_dim + d;
    const float x = wa == 0.0F ? 0.0F : wa * load_element(m.a, m.dtype, at);
    const float y = wb == 0.0F ? 0.0F : wb * load_element(m.b, m.dtype, at);
    store_element(m.out, m.dtype, at, x + y);
  }
  if (m.lse != nullptr) {
    __syncthreads();
    if (threadIdx.x == 0) m.lse[row] = empty ? -INFINITY : top + logf(sum);
  }
}

template <Format kFormat, class Run>
Status for_head_dim(int head_dim, const Run& run) {
  switch (head_dim) {
    case 64:
      run.template operator()<kFormat, 64>();
      break;
    case 96:
      run.template operator()<kFormat, 96>();
      break;
    case 128:
      run.template operator()<kFormat, 128>();
      break;
    case 192:
      run.template operator()<kFormat, 192>();
      break;
    case 256:
      run.template operator()<kFormat, 256>();
      break;
    default:
      return {StatusCode::kUnsupported, "head_dim must be 64, 96, 128, 192 or 256"};
  }
  return {};
}

template <class Run>
Status for_shape(Format format, int head_dim, const Run& run) {
  return format == Format::kNvfp4 ? for_head_dim<Format::kNvfp4>(head_dim, run)
                                  : for_head_dim<Format::kMxfp4>(head_dim, run);
}

}  // namespace

Status launch_write(const WriteArgs& args, void* stream) {
  if (args.plan.max_writes == 0) return {};
  const dim3 grid(static_cast<unsigned>(args.plan.max_writes),
                  static_cast<unsigned>(args.layer.num_kv_heads));
  Status status = for_shape(args.layer.format, args.layer.head_dim, [&]<Format kFormat, int kDim>() {
    write_kernel<kFormat, kDim><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  return status.ok() ? check(cudaGetLastError(), "launching the cache write") : status;
}

Status launch_gather(const GatherArgs& args, void* stream) {
  const std::int64_t first = args.what.begin / kTileTokens;
  const std::int64_t last = (args.what.end + kTileTokens - 1) / kTileTokens;
  if (last <= first) return {};
  const dim3 grid(static_cast<unsigned>(last - first),
                  static_cast<unsigned>(args.layer.num_kv_heads));
  Status status = for_shape(args.layer.format, args.layer.head_dim, [&]<Format kFormat, int kDim>() {
    gather_kernel<kFormat, kDim><<<grid, 256, 0, static_cast<cudaStream_t>(stream)>>>(args);
  });
  return status.ok() ? check(cudaGetLastError(), "launching the gather") : status;
}

Status launch_merge(const CudaBackend::Merge& merge, void* stream) {
  const std::int64_t rows = merge.tokens * merge.heads;
  if (rows == 0) return {};
  merge_kernel<<<static_cast<unsigned>(rows), 128, 0, static_cast<cudaStream_t>(stream)>>>(merge);
  return check(cudaGetLastError(), "launching the merge");
}

}  // namespace bitdecoding::cuda
