// SPDX-License-Identifier: Apache-2.0
// Attention in double precision over what the cache says, so that a wrong kernel cannot pass for a
// fast one.
#pragma once

#include "bench_scene.h"

namespace bitdecoding::cli {

// Relative L2 error of scene.output() over up to `max_pairs` (request, KV head) pairs and, for
// long chunks, some of their query rows. Pages are dequantized by the reference backend.
Result<double> relative_error(Scene& scene, int max_pairs);

}  // namespace bitdecoding::cli
