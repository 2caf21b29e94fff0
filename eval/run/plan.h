// SPDX-License-Identifier: Apache-2.0
// Which rows a run asks for, and in what order.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/benchmark.h"
#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct RowChoice {
  std::size_t rows = 0;  // of a benchmark; 0: all. Spread evenly over its groups
  int repeats = 1;
  std::uint64_t seed = 42;
  std::size_t most_new_tokens = 0;  // caps a benchmark's budget; 0: does not
  bool greedy = false;              // temperature 0 whatever the benchmark samples with
  bool strict = false;              // a row that cannot be read is an error
};

struct PlannedRow {
  const Benchmark* benchmark = nullptr;
  BenchmarkRow row;
  int repeat = 0;
  std::uint64_t seed = 0;
  std::string prompt_hash;
};

struct PlannedBenchmark {
  const Benchmark* benchmark = nullptr;
  Sampling sampling;
  Budget budget;
  std::vector<PlannedRow> rows;  // neighbours share as much of their prompts as can be
  std::vector<RowProblem> problems;
  std::map<std::string, std::string> files;  // path -> hash of the bytes that were read
};

// An error when a benchmark has no rows at all, or with `strict` a row has a problem.
Result<std::vector<PlannedBenchmark>> plan_rows(const std::vector<const Benchmark*>& benchmarks,
                                                const LoadOptions& load, const RowChoice& choice);

}  // namespace bitdecoding::eval
