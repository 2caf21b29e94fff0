// Argument checks that all backends share. What they let through is safe to run.
#pragma once

#include <cstdint>

#include "bitdecoding/attend.h"
#include "bitdecoding/quantize.h"

namespace bitdecoding {

Status validate_write(const WriteParams& params);
Status validate_attend(const AttendParams& params);
// `params` needs layer, cache and plan only.
Status validate_gather(const AttendParams& params, int request, int kv_head, std::int64_t begin,
                       std::int64_t end, const float* key, const float* value);

}  // namespace bitdecoding
