// SPDX-License-Identifier: Apache-2.0
// The benches of `bitdecoding bench`; each fills one row of results.
#pragma once

#include <nlohmann/json.hpp>

#include "bench_options.h"
#include "bitdecoding/status.h"

namespace bitdecoding::cli {

Result<nlohmann::ordered_json> bench_decode(const BenchOptions& options);
Result<nlohmann::ordered_json> bench_write(const BenchOptions& options);
Result<nlohmann::ordered_json> bench_prefill(const BenchOptions& options);
Result<nlohmann::ordered_json> bench_capacity(const BenchOptions& options);

// Runs bench/peers/compare.py, which alternates calls of this library and of each peer in one
// process, and adds `peer`, `ratio` and `peers` to the row.
Status add_peers(const char* verb, const BenchOptions& options, nlohmann::ordered_json* row);

}  // namespace bitdecoding::cli
