// SPDX-License-Identifier: Apache-2.0
// The part of a step's plan that needs no directory: bounds, page lists, and which rows of the
// step's tensors fall into which group.
#pragma once

#include <cstdint>
#include <vector>

#include "bitdecoding/page.h"

namespace bitdecoding {

struct StepBounds {
  std::int64_t num_pages = 0;
  int max_requests = 0;
  int page_size = 0;
  int group_tokens = 0;
};

// Checks `input` and fills page_ids, requests (pages set, spans not) and writes (slot -1).
// write_request[i] is the request of writes[i].
Status lay_out_step(const StepBounds& bounds, const StepInput& input, StepPlan* plan,
                    std::vector<std::int32_t>* write_request);

}  // namespace bitdecoding
