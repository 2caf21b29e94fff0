// SPDX-License-Identifier: Apache-2.0
// What a server says when it refuses, for a sentence of ours.
#pragma once

#include <string>

namespace bitdecoding::eval {

// The first 300 bytes, with dots for what is not printable ASCII.
std::string printable(const std::string& text);

// vLLM's errors are {"error": {"message": ...}} or {"message": ...}, FastAPI's {"detail": ...};
// anything else is quoted.
std::string server_words(const std::string& body);

}  // namespace bitdecoding::eval
