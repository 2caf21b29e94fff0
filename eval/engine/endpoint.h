// SPDX-License-Identifier: Apache-2.0
// Where a server that speaks OpenAI's HTTP interface is.
#pragma once

#include <string>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct Endpoint {
  std::string base;    // "http://127.0.0.1:8000"
  std::string prefix;  // a path before "/v1", without a slash at its end
};

// "http://HOST[:PORT][/PATH][/v1]"; https where the HTTP library has it.
Result<Endpoint> parse_endpoint(const std::string& url);
Endpoint loopback(int port);

}  // namespace bitdecoding::eval
