// SPDX-License-Identifier: Apache-2.0
// Attention in fp4 arithmetic: what FP4 tensor cores compute, on any GPU. Codes and scales of
// queries and probabilities are the reference's, bit for bit; products of blocks are exact integers
// times exact scales, and what is added is added in double precision. Compiled without fused
// multiply-add.
//
// Probabilities are quantized relative to their row's maximum over all its pages, so a row is
// walked twice: maxima first, then probabilities and values. Rows are cut into parts when there are
// too few to fill the device; then parts meet in the workspace: maxima, values and BF16 rows,
// merge.
#include "any/fp4_attend.cuh"
#include "common/error.h"
#include "common/for_shape.h"

namespace bitdecoding::cuda {
namespace {

// Part of the workspace that this block of rows has, `each` numbers for each of its parts.
__device__ double* share(double* of, std::int64_t parts, std::int64_t each) {
  return of + std::int64_t{blockIdx.x} * parts * each;
}

template <Format kFormat, int kHeadDim>
__global__ void __launch_bounds__(kFp4Threads, 2) maxima_kernel(const __grid_constant__ Fp4Args a) {
  using Attend = Fp4Attend<kFormat, kHeadDim>;
  __shared__ typename Attend::Shared shared;
  const Fp4Block block(a, static_cast<int>(blockIdx.x));
  if (!block.exists(a)) return;
  Attend attend(a, block, shared);
  const int part = static_cast<int>(blockIdx.y);
  attend.find_maxima(part);
  attend.store_maxima(share(a.maxima, a.splits, kFp4Rows) + part * kFp4Rows);
}

template <Format kFormat, int kHeadDim>
__global__ void __launch_bounds__(kFp4Threads, 2) attend_kernel(const __grid_constant__ Fp4Args a) {
  using Attend = Fp4Attend<kFormat, kHeadDim>;
  __shared__ typename Attend::Shared shared;
  const Fp4Block block(a, static_cast<int>(blockIdx.x));
  if (!block.exists(a)) return;
  Attend attend(a, block, shared);
  if (a.splits == 1) {
    attend.find_maxima(0);
    attend.add_tiles(0);
    attend.add_bf16_rows();
    attend.store_result();
    return;
  }
  const int part = static_cast<int>(blockIdx.y);
  const bool bf16 = part == a.splits;
  if (bf16) {
    attend.add_bf16_rows();
  } else {
    attend.load_maxima(share(a.maxima, a.splits, kFp4Rows));
    attend.add_tiles(part);
  }
  attend.store_part(share(a.partials, a.splits + 1, Attend::kPart) + part * Attend::kPart, bf16);
}

template <Format kFormat, int kHeadDim>
__global__ void __launch_bounds__(kFp4Threads, 2) merge_kernel(const __grid_constant__ Fp4Args a) {
  using Attend = Fp4Attend<kFormat, kHeadDim>;
  __shared__ typename Attend::Shared shared;
  const Fp4Block block(a, static_cast<int>(blockIdx.x));
  if (!block.exists(a)) return;
  Attend attend(a, block, shared);
  attend.load_parts(share(a.partials, a.splits + 1, Attend::kPart));
  attend.store_result();
}

}  // namespace

Status launch_attend_fp4(Format format, int head_dim, const Fp4Args& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const auto rows = static_cast<unsigned>(fp4_blocks(args));
  const auto splits = static_cast<unsigned>(args.splits);
  Status status = for_shape(format, head_dim, [&]<Format kFormat, int kDim>() {
    if (splits == 1) {
      attend_kernel<kFormat, kDim><<<rows, kFp4Threads, 0, on>>>(args);
      return;
    }
    maxima_kernel<kFormat, kDim><<<dim3(rows, splits), kFp4Threads, 0, on>>>(args);
    attend_kernel<kFormat, kDim><<<dim3(rows, splits + 1), kFp4Threads, 0, on>>>(args);
    merge_kernel<kFormat, kDim><<<rows, kFp4Threads, 0, on>>>(args);
  });
  return status.ok() ? check(cudaGetLastError(), "launching attention in fp4 arithmetic") : status;
}

}  // namespace bitdecoding::cuda
