// SPDX-License-Identifier: Apache-2.0
// The spelling of request fields. vLLM ignores a field that it does not know and answers 200, so a
// misspelt option would silently measure something else.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

// An error names the unknown field and the nearest known one. `path` is the endpoint's.
Status check_request_fields(const std::string& path, const nlohmann::json& body);

}  // namespace bitdecoding::eval
