// SPDX-License-Identifier: Apache-2.0
// LongBench-Pro: 25 tasks on long English and Chinese texts, six metrics.
#pragma once

#include <memory>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

std::unique_ptr<Benchmark> make_longbench_pro();

}  // namespace bitdecoding::eval
