// SPDX-License-Identifier: Apache-2.0
// The verbs of the reference backend; arguments have been validated.
#pragma once

#include <cstdint>

#include "bitdecoding/attend.h"
#include "bitdecoding/quantize.h"

namespace bitdecoding::reference {

void write(const WriteParams& params);
void attend(const AttendParams& params);
void gather(const AttendParams& params, const RequestPlan& request, int kv_head, std::int64_t begin,
            std::int64_t end, float* key, float* value);

void add_relaxed(std::uint64_t* counter, std::uint64_t n);

}  // namespace bitdecoding::reference
