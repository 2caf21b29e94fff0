// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/longbench_pro/metrics.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <unordered_map>

#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

using Lines = std::vector<std::string>;

const std::map<std::string_view, Metric>& tasks() {
  static const std::map<std::string_view, Metric> all = {
      {"T1.1 Global Cohesive Retrieval", Metric::kNdcg},
      {"T1.2 Key-Snippet Retrieval", Metric::kNdcg},
      {"T2.1 Global Timeline Reconstruction", Metric::kPairwise},
      {"T2.2 Local Causal Chain Sorting", Metric::kPairwise},
      {"T3.1 Multi-Doc Integration QA", Metric::kAccuracy},
      {"T3.2 Single-Hop Fact QA", Metric::kAccuracy},
      {"T4.1 Global-Coverage Constrained Summary", Metric::kSummary},
      {"T4.2 Query-Focused Summary", Metric::kSummary},
      {"T5.1 Full-Sentence Citation Alignment", Metric::kF1},
      {"T5.2 Key-Statement Citation Alignment", Metric::kF1},
      {"T6.1 Large-Scale Document Clustering", Metric::kSubEm},
      {"T6.2 Targeted Subset Cluster Identification", Metric::kF1},
      {"T6.3 Global Frequency Analysis", Metric::kPairwise},
      {"T7.1 Global Conflict & Inconsistency Localization", Metric::kF1},
      {"T7.2 Targeted Rule or Condition Violation Detection", Metric::kF1},
      {"T7.3 Comprehensive Error & Anomaly Sweep", Metric::kF1},
      {"T8.1 Structured Multi-Source Consistency Verification", Metric::kSubEm},
      {"T8.2 Single-Source Targeted Aggregation", Metric::kSubEm},
      {"T8.3 Long-Context Procedural State Tracking", Metric::kSubEm},
      {"T9.1 Dependency-Aware Multi-Version Impact Analysis", Metric::kF1},
      {"T9.2 Localized Interface Change Detection", Metric::kF1},
      {"T10.1 Large-Scale In-Context Rule Induction", Metric::kSubEm},
      {"T10.2 Targeted Example-Based Rule Induction", Metric::kSubEm},
      {"T11.1 Long-Range Entity & Commitment Tracking", Metric::kAccuracy},
      {"T11.2 Short-Range Reference Resolution & State Query", Metric::kAccuracy}};
  return all;
}

// Where each line comes last.
std::unordered_map<std::string_view, std::size_t> last_places(const Lines& lines) {
  std::unordered_map<std::string_view, std::size_t> out;
  for (std::size_t i = 0; i < lines.size(); ++i) out[lines[i]] = i;
  return out;
}

double discounted(double gain, std::size_t rank) {
  return gain / std::log2(static_cast<double>(rank) + 2);
}

}  // namespace

const Metric* metric_of(std::string_view secondary_task) {
  const auto found = tasks().find(secondary_task);
  return found == tasks().end() ? nullptr : &found->second;
}

const char* metric_name(Metric metric) {
  switch (metric) {
    case Metric::kNdcg:
      return "NDCG@k";
    case Metric::kPairwise:
      return "pairwise accuracy";
    case Metric::kAccuracy:
      return "accuracy";
    case Metric::kF1:
      return "F1";
    case Metric::kSubEm:
      return "SubEM";
    case Metric::kSummary:
      return "summary";
  }
  return "";
}

std::string normalized(std::string_view text) {
  return encode_utf8(one_spaced(lower(decode_utf8(text))));
}

std::vector<std::string> answer_lines(std::string_view reply) {
  for (const std::string_view mark : {"[Answer]", "[\u7b54\u6848]"}) {
    const std::size_t at = reply.rfind(mark);
    if (at == std::string_view::npos) continue;
    reply.remove_prefix(at + mark.size());
    break;
  }
  const std::u32string text = lower(strip(decode_utf8(reply)));
  Lines out;
  for (const std::u32string_view line : split(std::u32string_view(text), U'\n')) {
    out.push_back(encode_utf8(one_spaced(line)));
  }
  return out;
}

double ndcg(const Lines& answers, const Lines& lines) {
  if (answers.empty() || lines.empty()) return 0.0;
  std::unordered_map<std::string_view, double> gains;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    gains[answers[i]] = static_cast<double>(answers.size() - i);
  }
  const auto places = last_places(lines);
  std::vector<std::pair<std::size_t, std::string_view>> ranked;
  ranked.reserve(places.size());
  for (const auto& [line, place] : places) ranked.emplace_back(place, line);
  std::sort(ranked.begin(), ranked.end());
  double gained = 0.0;
  for (std::size_t rank = 0; rank < std::min(ranked.size(), answers.size()); ++rank) {
    const auto found = gains.find(ranked[rank].second);
    if (found != gains.end()) gained += discounted(found->second, rank);
  }
  std::vector<double> ideal;
  ideal.reserve(gains.size());
  for (const auto& [line, gain] : gains) ideal.push_back(gain);
  std::sort(ideal.begin(), ideal.end(), std::greater<>());
  double best = 0.0;
  for (std::size_t rank = 0; rank < ideal.size(); ++rank) best += discounted(ideal[rank], rank);
  return best > 0.0 ? gained / best : 0.0;
}

double pairwise_accuracy(const Lines& answers, const Lines& lines) {
  if (answers.size() < 2 || lines.size() < 2) return 0.0;
  const auto places = last_places(lines);
  std::vector<std::size_t> found;
  for (const std::string& answer : answers) {
    const auto place = places.find(answer);
    if (place != places.end()) found.push_back(place->second);
  }
  std::size_t right = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (std::size_t j = i + 1; j < found.size(); ++j) right += found[i] < found[j] ? 1 : 0;
  }
  const std::size_t pairs = lines.size() * (lines.size() - 1) / 2;
  return static_cast<double>(right) / static_cast<double>(pairs);
}

double accuracy(const Lines& answers, const Lines& lines) {
  return !answers.empty() && !lines.empty() && answers[0] == lines[0] ? 1.0 : 0.0;
}

double f1_score(const Lines& answers, const Lines& lines) {
  const std::set<std::string_view> wanted(answers.begin(), answers.end());
  const std::set<std::string_view> given(lines.begin(), lines.end());
  const auto common = static_cast<double>(std::count_if(
      given.begin(), given.end(), [&](std::string_view line) { return wanted.count(line) != 0; }));
  if (common == 0) return 0.0;
  const double precision = common / static_cast<double>(given.size());
  const double recall = common / static_cast<double>(wanted.size());
  return (2 * precision * recall) / (precision + recall);
}

double sub_em(const Lines& answers, const Lines& lines) {
  if (answers.empty() || lines.empty()) return 0.0;
  const std::set<std::string_view> given(lines.begin(), lines.end());
  const auto found = std::count_if(answers.begin(), answers.end(), [&](const std::string& answer) {
    return given.count(answer) != 0;
  });
  return static_cast<double>(found) / static_cast<double>(answers.size());
}

}  // namespace bitdecoding::eval
