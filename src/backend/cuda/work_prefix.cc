// SPDX-License-Identifier: Apache-2.0
// How attend's work is shared, for uploaded plans: as the planning kernel does (any/plan.cu).
#include "cuda_plan.h"

namespace bitdecoding::cuda {

std::vector<std::int32_t> Plan::work_prefix(const std::vector<Request>& requests,
                                            int window_left) const {
  const auto sum_up = [&](auto size) {
    std::vector<std::int32_t> prefix = {0};
    for (const Request& r : requests) {
      const int rows =
          limits_.num_kv_heads * row_blocks(r.query_len, args_.num_q_per_kv, args_.plan.columns);
      prefix.push_back(prefix.back() + size(decoded_units(r, window_left)) * rows);
    }
    return prefix;
  };
  std::vector<std::int32_t> units = sum_up([](int of_row) { return of_row; });
  const std::int32_t blocks = args_.plan.num_blocks;
  for (int i = 0; i < kMostTries && units.back() > 0; ++i) {
    const int most = most_to_try(units.back(), blocks, i);
    std::vector<std::int32_t> parts =
        sum_up([&](int of_row) { return parts_of_row(of_row, most); });
    if (parts.back() > blocks) continue;
    parts.push_back(most);
    return parts;
  }
  units.push_back(0);
  return units;
}

}  // namespace bitdecoding::cuda
