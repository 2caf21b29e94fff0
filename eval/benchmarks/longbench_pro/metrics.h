// SPDX-License-Identifier: Apache-2.0
// LongBench-Pro's metrics, equal to those of its repository's runner, quirks included. All work on
// lines: lower case, words with one space between them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace bitdecoding::eval {

enum class Metric { kNdcg, kPairwise, kAccuracy, kF1, kSubEm, kSummary };

// The metric of a secondary task ("T1.1 Global Cohesive Retrieval"); null for a name that the
// benchmark does not have.
const Metric* metric_of(std::string_view secondary_task);
const char* metric_name(Metric metric);

// Lower case, stripped, one space between words.
std::string normalized(std::string_view text);
// The lines behind the last "[Answer]", else behind the last "[答案]", else all, normalized.
std::vector<std::string> answer_lines(std::string_view reply);

// `answers` normalized, `lines` of `answer_lines`.
//
// trec_eval's ndcg_cut at k = the number of answers, the first answer worth most. A line that comes
// twice stands where it comes last.
double ndcg(const std::vector<std::string>& answers, const std::vector<std::string>& lines);
// Pairs in the right order over all pairs of *lines*: more lines, smaller score. May exceed 1 when
// answers repeat.
double pairwise_accuracy(const std::vector<std::string>& answers,
                         const std::vector<std::string>& lines);
double accuracy(const std::vector<std::string>& answers, const std::vector<std::string>& lines);
double f1_score(const std::vector<std::string>& answers, const std::vector<std::string>& lines);
double sub_em(const std::vector<std::string>& answers, const std::vector<std::string>& lines);

}  // namespace bitdecoding::eval
