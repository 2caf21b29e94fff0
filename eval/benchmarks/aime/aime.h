// SPDX-License-Identifier: Apache-2.0
// AIME 2024 and 2025: an integer from 0 to 999 in the last box.
#pragma once

#include <memory>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

std::unique_ptr<Benchmark> make_aime24();
std::unique_ptr<Benchmark> make_aime25();

}  // namespace bitdecoding::eval
