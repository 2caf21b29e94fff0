// SPDX-License-Identifier: Apache-2.0
// How much each task does. Prompts are nested in one document, so a server prefills `context`
// tokens once and everything else is short.
#pragma once

#include <string>
#include <vector>

namespace bitdecoding::eval {

struct Plan {
  std::vector<std::string> questions;
  int answer_tokens = 32;
  std::vector<std::size_t> needle_lengths;
  std::size_t kl_tokens = 4096;
  std::size_t kl_first = 256;      // scored from this position on
  std::size_t context = 6144;      // of the throughput task
  std::vector<int> users;          // at the same time
  int decode_tokens = 48;          // each user's answer in the throughput task
  std::size_t chunk_tokens = 128;  // --max-num-batched-tokens
};

Plan full_plan();
Plan quick_plan();

}  // namespace bitdecoding::eval
