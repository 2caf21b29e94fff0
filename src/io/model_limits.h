// SPDX-License-Identifier: Apache-2.0
// No model has more: files and callers that say so are damaged or made up.
#pragma once

#include <cstdint>

namespace bitdecoding {

inline constexpr std::int64_t kMaxLayers = 4096;
inline constexpr std::int64_t kMaxKvHeads = 4096;

}  // namespace bitdecoding
