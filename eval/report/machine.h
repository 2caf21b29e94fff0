// SPDX-License-Identifier: Apache-2.0
// What the figures were measured on.
#pragma once

#include <nlohmann/json.hpp>

namespace bitdecoding::eval {

// {"cpu", "cores", "memory_gib", "system", "kernel"}; a field that cannot be read is absent.
nlohmann::json describe_machine();
int usable_cores();
double available_memory_gib();

}  // namespace bitdecoding::eval
