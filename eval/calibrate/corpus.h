// SPDX-License-Identifier: Apache-2.0
// The texts that a calibration sends: the built-in ones, or the user's.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct CalibrationText {
  std::string name;         // "builtin prose 3", "data.jsonl line 7"
  std::string text;         // or, when empty,
  nlohmann::json messages;  // a conversation [{"role", "content"}, ...]
};

// Prose, code, dialogue and numbers in turn, made by a generator that gives the same bytes on every
// machine: some 150,000 tokens (docs/calibration.md).
std::vector<CalibrationText> builtin_corpus();

// One JSON object a line, {"text": "..."} or {"messages": [...]}; other keys are ignored. An error
// names the line. kInvalidArgument when there is no text at all.
Result<std::vector<CalibrationText>> read_corpus(const std::string& path);

// Of all texts in their order.
std::string corpus_hash(const std::vector<CalibrationText>& texts);

}  // namespace bitdecoding::eval
