// SPDX-License-Identifier: Apache-2.0
// What stands in LaTeX boxes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bitdecoding::eval {

// The contents of every \boxed{...} whose braces close, in their order; a box in a box is part of
// the outer one.
std::vector<std::string> boxes(std::string_view text);

// A whole number as people write it in a box: leading zeros, signs, spaces, $, \text{...},
// degrees, "m + n = 42", "42.0".
std::optional<std::int64_t> boxed_integer(std::string_view content);

}  // namespace bitdecoding::eval
