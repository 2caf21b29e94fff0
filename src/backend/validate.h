// SPDX-License-Identifier: Apache-2.0
// Argument checks that all backends share. What they let through is safe to run.
#pragma once

#include <cstdint>

#include "bitdecoding/attend.h"
#include "bitdecoding/quantize.h"

namespace bitdecoding {

// Parts of the checks below that look at no memory behind pointers, so that they hold for device
// memory as well.
Status validate_layer_shape(const LayerConfig* layer);
Status validate_group_size(const LayerConfig& layer);
// The two ways to lay out pages of heads: [page][head] and [head][page], each with any padding.
Status validate_cache(const CacheView& cache, const LayerConfig& layer);
Status validate_tensor(const char* what, const TensorView& t, std::int64_t tokens, int heads,
                       int head_dim);
// sm_scale and softcap are 1 / kMostScoreFactor to kMostScoreFactor. No model comes near either
// end; numbers beyond are left-overs of an uninitialised or missing value, and make every score
// infinite or zero.
inline constexpr float kMostScoreFactor = 65536.0F;
Status validate_score_scalars(float sm_scale, float softcap, int window_left);
// The same and the arithmetic; attn_sink is not looked at.
Status validate_scalars(const AttendParams& params);

// The exponents of key_outer and value_outer.
Status validate_outer_scales(const LayerConfig& layer);
Status validate_write(const WriteParams& params);
Status validate_attend(const AttendParams& params);
// `params` needs layer, cache and plan only.
Status validate_gather(const AttendParams& params, int request, int kv_head, std::int64_t begin,
                       std::int64_t end, const float* key, const float* value);

}  // namespace bitdecoding
