// SPDX-License-Identifier: Apache-2.0
#include "engine/server_log.h"

#include <cstdlib>

namespace bitdecoding::eval {
namespace {

// label="value", with \\ \" \n inside the quotes. Returns the offset behind the closing brace, or
// npos when the text is cut or malformed.
std::size_t parse_labels(std::string_view line, std::size_t at,
                         std::map<std::string, std::string>* labels) {
  while (at < line.size() && line[at] != '}') {
    const std::size_t equals = line.find("=\"", at);
    if (equals == std::string_view::npos) return equals;
    const std::string name(line.substr(at, equals - at));
    std::string value;
    for (at = equals + 2; at < line.size() && line[at] != '"'; ++at) {
      if (line[at] == '\\' && at + 1 < line.size()) ++at;
      value += line[at];
    }
    if (at >= line.size()) return std::string_view::npos;
    (*labels)[name] = value;
    ++at;
    if (at < line.size() && line[at] == ',') ++at;
  }
  return at < line.size() ? at + 1 : std::string_view::npos;
}

bool parse_sample(std::string_view line, MetricSample* out) {
  if (line.empty() || line[0] == '#') return false;
  const std::size_t name_end = line.find_first_of("{ ");
  if (name_end == std::string_view::npos) return false;
  out->name = line.substr(0, name_end);
  std::size_t at = name_end;
  if (line[at] == '{') at = parse_labels(line, at + 1, &out->labels);
  if (at == std::string_view::npos || at >= line.size()) return false;
  const std::string number(line.substr(at));
  char* end = nullptr;
  out->value = std::strtod(number.c_str(), &end);
  return end != number.c_str();
}

}  // namespace

std::vector<MetricSample> parse_metrics(std::string_view text) {
  std::vector<MetricSample> out;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    MetricSample sample;
    if (parse_sample(text.substr(0, end), &sample)) out.push_back(std::move(sample));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return out;
}

std::optional<double> metric_total(const std::vector<MetricSample>& samples,
                                   std::string_view name) {
  std::optional<double> total;
  for (const MetricSample& sample : samples) {
    if (sample.name == name) total = total.value_or(0.0) + sample.value;
  }
  return total;
}

std::optional<std::int64_t> capacity_in_log(std::string_view log) {
  constexpr std::string_view kBefore = "KV cache size: ";
  const std::size_t begin = log.rfind(kBefore);
  if (begin == std::string_view::npos) return std::nullopt;
  std::int64_t tokens = 0;
  bool any = false;
  for (std::size_t i = begin + kBefore.size(); i < log.size(); ++i) {
    if (log[i] == ',') continue;
    if (log[i] < '0' || log[i] > '9') {
      return any && log.substr(i, 7) == " tokens" ? std::optional(tokens) : std::nullopt;
    }
    if (tokens > std::int64_t{1} << 50) return std::nullopt;
    tokens = tokens * 10 + (log[i] - '0');
    any = true;
  }
  return std::nullopt;
}

}  // namespace bitdecoding::eval
