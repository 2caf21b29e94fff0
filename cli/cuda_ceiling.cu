// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>

#include "../bench/cuda_read.cuh"
#include "cuda_ceiling.h"

namespace bitdecoding::cli {
namespace {

constexpr std::int64_t kBytes = std::int64_t{2} << 30;
constexpr int kPasses = 12;

}  // namespace

// Events around single passes: each takes half a millisecond, a launch's few microseconds do not
// matter.
int time_reads(double* best_ms, std::int64_t* bytes) {
  uint4* data = nullptr;
  cudaEvent_t events[2] = {};
  int blocks = 0;
  *bytes = kBytes;
  *best_ms = 0;
  cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&data), kBytes + 16);
  if (error == cudaSuccess) error = cudaMemset(data, 1, kBytes + 16);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  }
  for (cudaEvent_t& event : events) {
    if (error == cudaSuccess) error = cudaEventCreate(&event);
  }
  for (int i = 0; error == cudaSuccess && i < kPasses; ++i) {
    cudaEventRecord(events[0]);
    bench::read_all<<<blocks*(4 << (i % 3)), 512>>>(
        data, kBytes / 16, reinterpret_cast<std::uint32_t*>(data + kBytes / 16));
    cudaEventRecord(events[1]);
    error = cudaEventSynchronize(events[1]);
    float ms = 0;
    if (error == cudaSuccess) error = cudaEventElapsedTime(&ms, events[0], events[1]);
    if (i >= 3) *best_ms = *best_ms == 0 ? ms : std::min<double>(*best_ms, ms);
  }
  for (const cudaEvent_t event : events) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  cudaFree(data);
  return static_cast<int>(error);
}

}  // namespace bitdecoding::cli
