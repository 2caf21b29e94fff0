// SPDX-License-Identifier: Apache-2.0
// The run's records, gathered for display.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "report/results_log.h"
#include "report/table.h"

namespace bitdecoding::eval {

// Tasks of one mode, by name ("questions", "needle", "kl", ...), and its server's record.
struct ModeResults {
  std::string mode;
  std::map<std::string, nlohmann::json> tasks;

  // The number at a JSON pointer inside a task's data; nothing when it was not measured.
  std::optional<double> number(const std::string& task, const std::string& pointer) const;
};

struct Summary {
  std::string run;
  nlohmann::json settings;     // the record "run": machine, model, plan, date
  nlohmann::json calibration;  // the record "calibration": what the key means were found on
  std::vector<ModeResults> modes;

  const ModeResults* find(const std::string& mode) const;
};

Summary summarize(const ResultsLog& log, const std::string& run,
                  const std::vector<std::string>& modes);

// What a mode is, in a few words, for tables and the report.
std::string mode_words(const std::string& mode);

// "46,592"; "-" for nothing.
std::string grouped(std::optional<double> value);
// Three significant digits, without an exponent where it reads well; "-" for nothing.
std::string compact(std::optional<double> value);
// "3.41x" of a base; "-" when either is missing.
std::string times(std::optional<double> value, std::optional<double> base);

Table figures_table(const Summary& summary);
// The same rows in words: answers to the questions, one block a question.
std::string answers_text(const Summary& summary, Style style);

}  // namespace bitdecoding::eval
