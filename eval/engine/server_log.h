// SPDX-License-Identifier: Apache-2.0
// What a server says about itself, in its log and in /metrics.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bitdecoding::eval {

struct MetricSample {
  std::string name;
  std::map<std::string, std::string> labels;
  double value = 0.0;
};

// The Prometheus text format; lines that are not samples are passed over.
std::vector<MetricSample> parse_metrics(std::string_view text);
// The sum over all label sets; nothing when the metric is absent.
std::optional<double> metric_total(const std::vector<MetricSample>& samples, std::string_view name);

// From the log line "CPU KV cache size: 46,592 tokens, ...".
std::optional<std::int64_t> capacity_in_log(std::string_view log);

}  // namespace bitdecoding::eval
