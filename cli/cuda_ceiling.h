// SPDX-License-Identifier: Apache-2.0
// How fast the current GPU reads its memory. Plain types: this is shared with code for the device.
#pragma once

#include <cstdint>

namespace bitdecoding::cli {

// Best of several passes over a buffer far larger than any cache. Returns a cudaError_t.
int time_reads(double* best_ms, std::int64_t* bytes);

}  // namespace bitdecoding::cli
