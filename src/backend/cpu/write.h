// SPDX-License-Identifier: Apache-2.0
// The write verb on the CPU: work items over (group write, KV head).
#pragma once

#include <cstdint>

#include "backend/cpu/thread_pool.h"
#include "backend/cpu/write_kernels.h"
#include "bitdecoding/quantize.h"

namespace bitdecoding::cpu {

// `params` has been validated (backend/validate.h). An empty `parallel` runs on the caller. Two
// items never touch the same byte: a plan has one write a group.
Status cpu_write(const WriteParams& params, const WriteKernels& kernels,
                 const ParallelFor& parallel);

}  // namespace bitdecoding::cpu
