// SPDX-License-Identifier: Apache-2.0
// Pages attended as FP4 tensor cores would: two-term NVFP4 queries, NVFP4 probabilities in blocks
// of 16 tokens relative to the row's maximum over all its page positions. An emulation for
// measuring accuracy: scores are kept for the whole range, so memory grows with the context.
#pragma once

#include "backend/cpu/attend_scratch.h"
#include "backend/cpu/tile_source.h"

namespace bitdecoding::cpu {

// Returns -1, or the first tile that a row sees and the block table lacks.
std::int64_t attend_pages_fp4(const AttendParams& params, const AttendKernels& kernels,
                              const RequestRows& rows, const TileSource& source,
                              const AttendGroup& group, const AttendItem& item,
                              const PartialView& partial);

}  // namespace bitdecoding::cpu
