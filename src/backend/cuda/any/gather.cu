// SPDX-License-Identifier: Apache-2.0
// Dequantize: pages and BF16 rows of a request as numbers, and the merge of two partial results.
// Compiled without fused multiply-add, as the writer is.
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
        const layout::Nibble at = side == 0
                                      ? layout::key_code(kFormat, kOrder, kHeadDim, row, dim)
                                      : layout::value_code(kFormat, kOrder, kHeadDim, row, dim);
        const std::uint8_t scale =
            bytes[side == 0 ? layout::key_scale(kFormat, kOrder, kHeadDim, row, dim)
                            : layout::value_scale(kFormat, kOrder, kHeadDim, row, dim)];
        rows[i / kHeadDim][dim] = is_corrupt_scale(kFormat, scale)
                                      ? NAN
                                      : decode_e2m1(layout::take_code(bytes[at.byte], at)) *
                                            (decode_scale(kFormat, scale) * outer);
      }
      __syncthreads();
      using Row = LaneRow<kHeadDim>;
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
        Row lanes;
#pragma unroll
        for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
          for (int e = 0; e < Row::kEach; ++e) lanes.x[part][e] = rows[i][Row::dim(part, e)];
        }
        if (side == 0 && a.layer.hadamard) lanes.rotate();
#pragma unroll
        for (int part = 0; part < Row::kParts; ++part) {
#pragma unroll
          for (int e = 0; e < Row::kEach; ++e) {
            const int dim = Row::dim(part, e);
            float x = lanes.x[part][e];
            if (side == 0 && a.layer.key_shift != nullptr) {
              x += a.layer.key_shift[head * kHeadDim + dim];
            }
            if (slot >= 0) {
              x = decode_bf16(
                  a.layer.shadow[(((static_cast<std::int64_t>(slot) * a.layer.num_kv_heads + head) *
                                       2 +
                                   side) *
                                      group_tokens(kFormat) +
                                  slot_row) *
                                     kHeadDim +
                                 dim]);
            }
            store_element(
                side == 0 ? a.what.key : a.what.value, a.what.dtype,
                (position - a.what.begin) * a.what.stride_token + head * a.what.stride_head + dim,
                readable || slot >= 0 ? x : 0.0F);
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

}  // namespace

bool has_any_kernels() {
  cudaFuncAttributes attributes{};
  const bool found = cudaFuncGetAttributes(&attributes, merge_kernel) == cudaSuccess;
  if (!found) cudaGetLastError();  // it is not the next launch's error
  return found;
}

Status launch_gather(const GatherArgs& args, void* stream) {
  const std::int64_t first = args.what.begin / kTileTokens;
  const std::int64_t last = (args.what.end + kTileTokens - 1) / kTileTokens;
  if (last <= first) return {};
  const dim3 grid(static_cast<unsigned>(last - first),
                  static_cast<unsigned>(args.layer.num_kv_heads));
  Status status =
      for_shape(args.layer.format, args.layer.head_dim, [&]<Format kFormat, int kDim>() {
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
