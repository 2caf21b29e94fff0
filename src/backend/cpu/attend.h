// SPDX-License-Identifier: Apache-2.0
// The attend verb on the CPU: work items, the sources of each tile, and the merge of partial
// results.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backend/cpu/decode_kernels.h"
#include "backend/cpu/dequantize_kernels.h"
#include "backend/cpu/float_kernels.h"
#include "backend/cpu/matrix_kernels.h"
#include "backend/cpu/thread_pool.h"
#include "bitdecoding/attend.h"

namespace bitdecoding::cpu {

struct AttendKernels {
  const DecodeKernels* decode = nullptr;
  const DequantizeKernels* dequantize = nullptr;
  const FloatKernels* tile = nullptr;
  const MatrixKernels* matrix = nullptr;  // null: long chunks are attended to in floats
};

// Memory of one call, kept between calls.
struct AttendScratch;

class AttendScratchPool {
 public:
  AttendScratchPool();
  ~AttendScratchPool();
  std::unique_ptr<AttendScratch> take();
  void give(std::unique_ptr<AttendScratch> scratch);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<AttendScratch>> free_;
};

// `params` has been validated.
Status cpu_attend(const AttendParams& params, const AttendKernels& kernels,
                  const ParallelFor& parallel, AttendScratchPool& pool);

}  // namespace bitdecoding::cpu
