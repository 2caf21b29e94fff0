// SPDX-License-Identifier: Apache-2.0
// Large buffers on huge pages, and how fast this machine reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "bitdecoding/status.h"

namespace bitdecoding::cli {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

template <class T>
using HugeArray = std::unique_ptr<T[], Free>;

// Zeroed bytes, aligned to 2 MiB and advised to huge pages before they are touched. Null when
// there is no memory.
void* allocate_huge(std::size_t bytes);

// On a machine shared with others a wall clock also counts the neighbours; CPU time does not.
struct ReadCeiling {
  double gbps = 0;      // the best pass
  double cpu_gbps = 0;  // bytes by the CPU time of the slowest thread, the best pass
};

// Sums a buffer larger than any cache with `threads` threads, several times.
Result<ReadCeiling> measure_read_ceiling(int threads);

}  // namespace bitdecoding::cli
