// SPDX-License-Identifier: Apache-2.0
// CUDA's error codes as sentences.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "bitdecoding/status.h"

namespace bitdecoding::cuda {

// ok for cudaSuccess, else kInternal (kResourceExhausted for memory): "<doing> failed: <CUDA's
// words>".
Status check(cudaError_t error, std::string_view doing);

// Kernels' own refusals; here because fmt does not compile under nvcc.
Status too_little_shared(int head_dim, long long needed, long long offered);

}  // namespace bitdecoding::cuda
