// SPDX-License-Identifier: Apache-2.0
// Whether a program's output is the expected one, as lcb_runner decides it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

// The code of a reply: the lines between the last two lines that have three backticks; empty when
// there are fewer than two. A fence inside a sentence behind the code moves the pair: so it does
// in lcb_runner.
std::string extract_code(std::string_view reply);

// Text written to standard output: the same number of lines, each the same after stripping, or the
// same numbers, exactly, by decimal digits: 1.0 is 1, 0.1 is not 0.10000001.
bool same_output(std::string_view given, std::string_view expected);

// A value that a function returned against the expected one, a JSON text. `given` is as
// tools/eval/lcb_case.py writes it: {"i": "12"}, {"f": "0.1"}, {"s": ...}, {"b": ...}, {"n": 0},
// {"l": [...]}, {"d": [[k, v], ...]}, {"x": type} for all else. Equal is what Python calls equal.
Result<bool> same_value(const nlohmann::json& given, const std::string& expected);

}  // namespace bitdecoding::eval
