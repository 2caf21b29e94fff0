// SPDX-License-Identifier: Apache-2.0
// Prefill on the matrix unit: an item's tiles, from pages and from BF16 rows, for its query rows.
#pragma once

#include <cstdint>

#include "backend/cpu/attend.h"
#include "backend/cpu/attend_scratch.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/tile_source.h"

namespace bitdecoding::cpu {

// Adds the item's share to `partial`, whose rows are padded to kMatrixRows. Returns the first tile
// that is visible but has no page, or -1.
std::int64_t attend_matrix(const AttendParams& params, const AttendKernels& kernels,
                           const RequestRows& rows, const TileSource& source,
                           const AttendGroup& group, const AttendItem& item,
                           const PartialView& partial);

}  // namespace bitdecoding::cpu
