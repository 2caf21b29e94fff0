// SPDX-License-Identifier: Apache-2.0
// Gather: positions of one request and KV head as float rows.
#pragma once

#include <cstdint>

#include "backend/cpu/attend.h"

namespace bitdecoding::cpu {

// Arguments have been validated. kOutOfRange when a position has no page.
Status cpu_gather(const AttendParams& params, const AttendKernels& kernels, int request,
                  int kv_head, std::int64_t begin, std::int64_t end, float* key, float* value);

}  // namespace bitdecoding::cpu
