// SPDX-License-Identifier: Apache-2.0
// What makes two runs comparable: the same model, library and texts.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "demo/options.h"

namespace bitdecoding::eval {

// Name, size and time of each file; a missing one is listed as missing.
nlohmann::json file_identities(const std::vector<std::string>& paths);
// The model's files and the built library and plugin.
nlohmann::json build_identity(const DemoOptions& options);

}  // namespace bitdecoding::eval
