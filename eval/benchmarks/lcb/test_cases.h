// SPDX-License-Identifier: Apache-2.0
// The tests of a problem: public ones as JSON text, private ones as JSON text or as base64 of zlib
// of a pickled string of it. Unpickling runs code that the bytes name, so nothing is unpickled: a
// parser of its own takes one string and refuses everything else.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct TestCase {
  std::string input;
  std::string output;
  bool call = false;  // a function is called; else standard input and output
};

// Of a row of the data set, public tests first.
Result<std::vector<TestCase>> test_cases(const nlohmann::json& row);

Result<std::string> decode_base64(std::string_view text);
// At most `limit` bytes come out.
Result<std::string> inflate(std::string_view bytes, std::size_t limit);
// The one string of a pickle (protocols 2 to 5).
Result<std::string> pickled_string(std::string_view bytes);

}  // namespace bitdecoding::eval
