// SPDX-License-Identifier: Apache-2.0
// The known name nearest to a mistyped one, for "did you mean ...?".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace bitdecoding {

// Empty when nothing is near: more than a third of the letters would have to change (at least two
// may). Letter case and '-' against '_' do not count.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

// "; did you mean 'x'?" or nothing.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

// "a, b or c".
std::string join_or(const std::vector<std::string>& names);

}  // namespace bitdecoding
