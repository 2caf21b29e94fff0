// SPDX-License-Identifier: Apache-2.0
// OpenAI's MRCR: give back the n-th of several answers to the same request, a random string before
// it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

std::unique_ptr<Benchmark> make_mrcr();

// The data set card's grader: 0 unless the reply begins with `prefix`; else the ratio of the two
// texts without it.
double mrcr_grade(std::string_view reply, std::string_view answer, std::string_view prefix);

// The area under a curve of mean scores over the length of prompts, 0..1: by trapezoids over
// log2(tokens), divided by the curve's width. `points` are (tokens of a bin, mean score), each bin
// once; a single one is its own area; NaN without any.
double area_under_curve(std::vector<std::pair<double, double>> points);

// The bin of a prompt: "8192" for (4096, 8192], the upper ends being powers of two from 8192 on.
std::string length_bin(std::size_t tokens);

}  // namespace bitdecoding::eval
