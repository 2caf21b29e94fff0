// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a kernel's blocks become resident while its predecessor on the
// stream is still finishing, find their share of the work, and wait before they touch anything that
// the predecessor reads or writes.
//
// A kernel that is launched as dependent may read only the plan before wait_for_predecessor():
// CudaPlan's first launch after build() or upload() is an ordinary one (Plan::followed), so the
// plan is complete before any later launch begins. Every block has to wait, also one without work:
// a kernel must not be complete before those that it follows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace bitdecoding::cuda {

__device__ inline void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The successor's blocks may take the place of those that have ended.
__device__ inline void let_successor_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct LaunchShape {
  dim3 grid, block;
  std::size_t shared_bytes = 0;
  void* stream = nullptr;
  bool dependent = false;
};

template <class Args>
cudaError_t launch(void (*kernel)(Args), const LaunchShape& shape, const Args& args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(shape.stream);
  config.attrs = &attribute;
  config.numAttrs = shape.dependent ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args);
  // It is reported here, and not by whoever asks for the last error next.
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace bitdecoding::cuda
