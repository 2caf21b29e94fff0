// SPDX-License-Identifier: Apache-2.0
// The write verb's kernel: one group of one KV head, from rows of K and V to codes, scales and BF16
// rows.
//
// Cost model: a group of 16 tokens is 16 x head_dim keys (the rows written) and as many values
// (always the whole group). Divisions bound it: four_six takes three a value, amax6 one.
#pragma once

#include <cstdint>

#include "bitdecoding/quantize.h"

namespace bitdecoding::cpu {

struct WriteKernels {
  // Writes `write` for one KV head. `bytes` is the head in its page. Adds to `tally` (not atomic;
  // requantized_prefix is left to the caller: it counts groups, not heads).
  void (*group)(const WriteParams& params, const GroupWrite& write, int head, std::uint8_t* bytes,
                WriteCounters* tally) = nullptr;
};

// Kernels of a Highway target that this build contains; null otherwise.
const WriteKernels* write_kernels(std::int64_t target);

}  // namespace bitdecoding::cpu
