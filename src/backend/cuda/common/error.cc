// SPDX-License-Identifier: Apache-2.0
#include "common/error.h"

#include <fmt/format.h>

namespace bitdecoding::cuda {

Status check(cudaError_t error, std::string_view doing) {
  if (error == cudaSuccess) return {};
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted
                          : error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
                                  error == cudaErrorNoKernelImageForDevice
                              ? StatusCode::kUnsupported
                              : StatusCode::kInternal;
  return {code, fmt::format("{} failed: {} ({})", doing, cudaGetErrorString(error),
                            cudaGetErrorName(error))};
}

Status too_little_shared(int head_dim, long long needed, long long offered) {
  return {
      StatusCode::kUnsupported,
      fmt::format("decode of head_dim {} needs {} bytes of shared memory a block, but the device "
                  "offers {}",
                  head_dim, needed, offered)};
}

}  // namespace bitdecoding::cuda
