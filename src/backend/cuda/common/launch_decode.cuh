// SPDX-License-Identifier: Apache-2.0
// Launches the decode kernels of one format and head_dim. Each architecture's instances include it.
#pragma once

#include "common/decode.cuh"
#include "common/error.h"

namespace bitdecoding::cuda {

template <Format kFormat, int kHeadDim, int kColumnBlocks, int kWarps, int kEntries,
          template <int, int> class Ring>
Status launch_traits(const DecodeArgs& args, const DecodeLaunch& on) {
  using T = DecodeTraits<kFormat, kHeadDim, kColumnBlocks, kWarps, kEntries, Ring>;
  const std::int64_t bytes = decode_shared_bytes<T>(args.rows_in_use);
  if (bytes > on.shared_limit) return too_little_shared(kHeadDim, bytes, on.shared_limit);
  const auto kernel = decode_kernel<T>;
  Status status = check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(bytes)),
                        "setting the decode kernel's shared memory");
  if (!status.ok()) return status;
  kernel<<<on.grid, T::kThreads, static_cast<std::size_t>(bytes),
           static_cast<cudaStream_t>(on.stream)>>>(args);
  return check(cudaGetLastError(), "launching decode");
}

// A ring says how many warps share a block and how many entries each has: see each architecture.
template <Format kFormat, int kHeadDim, class Arch>
Status launch_columns(const DecodeShape& shape, const DecodeArgs& args, const DecodeLaunch& on) {
  constexpr int kWarps = Arch::warps(kHeadDim);
  if constexpr (most_column_blocks(kHeadDim) == 2) {
    if (shape.column_blocks == 2) {
      return launch_traits<kFormat, kHeadDim, 2, kWarps, Arch::entries(kHeadDim, 2),
                           Arch::template Ring>(args, on);
    }
  }
  return launch_traits<kFormat, kHeadDim, 1, kWarps, Arch::entries(kHeadDim, 1),
                       Arch::template Ring>(args, on);
}

}  // namespace bitdecoding::cuda
