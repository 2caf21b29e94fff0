// SPDX-License-Identifier: Apache-2.0
// Launches the decode kernels of one format and head_dim. Each architecture's instances include it.
#pragma once

#include "common/decode.cuh"
#include "common/dependent.cuh"
#include "common/error.h"

namespace bitdecoding::cuda {

template <Format kFormat, int kHeadDim, int kColumnBlocks, class Arch>
Status launch_traits(const DecodeArgs& args, const DecodeLaunch& on) {
  using T = DecodeTraits<kFormat, kHeadDim, kColumnBlocks, Arch>;
  const std::int64_t bytes = decode_shared_bytes<T>(args.rows_in_use);
  if (bytes > on.shared_limit) return too_little_shared(kHeadDim, bytes, on.shared_limit);
  const auto kernel = decode_kernel<T>;
  Status status = check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(bytes)),
                        "setting the decode kernel's shared memory");
  if (!status.ok()) return status;
  const LaunchShape shape{dim3(static_cast<unsigned>(on.grid)), dim3(T::kThreads),
                          static_cast<std::size_t>(bytes), on.stream, on.dependent};
  return check(launch(kernel, shape, args), "launching decode");
}

template <Format kFormat, int kHeadDim, class Arch>
Status launch_columns(const DecodeShape& shape, const DecodeArgs& args, const DecodeLaunch& on) {
  if constexpr (most_column_blocks(kHeadDim) == 2) {
    if (shape.column_blocks == 2) return launch_traits<kFormat, kHeadDim, 2, Arch>(args, on);
  }
  return launch_traits<kFormat, kHeadDim, 1, Arch>(args, on);
}

}  // namespace bitdecoding::cuda
