// SPDX-License-Identifier: Apache-2.0
// Times of single calls, and what the machine is.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "bench_options.h"
#include "bitdecoding/status.h"

namespace bitdecoding::cli {

struct Timing {
  double us_median = 0;
  double us_min = 0;
  double us_max = 0;
  double us_cpu_median = 0;  // CPU time of all threads of the process
  int calls = 0;
};

// Two calls to warm up, then at least `repeat` calls and `seconds` in all.
Result<Timing> measure(const std::function<Status()>& call, double seconds, int repeat);

void add_timing(const Timing& timing, nlohmann::ordered_json* row);
// cpu, cpu_id, version, date.
void add_machine(nlohmann::ordered_json* row);

double round_to(double value, int digits);
// One JSON line, or an aligned table of its keys and values.
void print_row(const nlohmann::ordered_json& row, bool json);

}  // namespace bitdecoding::cli
