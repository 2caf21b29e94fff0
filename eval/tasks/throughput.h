// SPDX-License-Identifier: Apache-2.0
// What token arrival times say about decode speed.
#pragma once

#include <vector>

#include "engine/client.h"

namespace bitdecoding::eval {

struct DecodeSpeed {
  int tokens = 0;  // that arrived while all users decoded
  double seconds = 0.0;
  double tokens_per_second = 0.0;
  double step_ms_median = 0.0;
};

// Counts from the moment the last user's first token came to the moment the first user's last token
// came: before and after, fewer users share a step. A zero result: the streams never overlapped.
DecodeSpeed decode_speed(const std::vector<std::vector<StreamedToken>>& users);

}  // namespace bitdecoding::eval
