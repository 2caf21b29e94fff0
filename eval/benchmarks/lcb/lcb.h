// SPDX-License-Identifier: Apache-2.0
// LiveCodeBench: programs that must pass every test of their problem.
#pragma once

#include <memory>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

std::unique_ptr<Benchmark> make_lcb();

}  // namespace bitdecoding::eval
