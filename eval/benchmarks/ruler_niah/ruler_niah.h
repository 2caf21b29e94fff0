// SPDX-License-Identifier: Apache-2.0
// RULER's needles: which of the reference strings a reply contains.
#pragma once

#include <memory>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

std::unique_ptr<Benchmark> make_ruler_niah();

// The fraction of `references` that the reply contains, letter case aside, after the clean-up of
// RULER's own runner: stripped, control characters as line ends. NVIDIA/RULER string_match_all is
// the mean over rows, times 100, to two places (`ruler_points`).
double string_match_all(std::string_view reply, const std::vector<std::string>& references);
// 100 times the mean, rounded to two places as Python rounds: the exact decimal value of the
// double decides, ties to even.
double ruler_points(const std::vector<double>& scores);

}  // namespace bitdecoding::eval
