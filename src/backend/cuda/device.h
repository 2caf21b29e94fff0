// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "bitdecoding/cuda.h"

namespace bitdecoding::cuda {

// The folder whose decode kernels run on a compute capability; empty when this library has none.
std::string kernels_of(int major, int minor);

// Why a device has no decode kernels, and what to do.
Status no_decode_kernels(const CudaDevice& device);

}  // namespace bitdecoding::cuda
