// SPDX-License-Identifier: Apache-2.0
// How alike two texts are: the ratio of Python's difflib.SequenceMatcher, to the last digit, over
// code points.
#pragma once

#include <string_view>

namespace bitdecoding::eval {

// 2 * (code points in matching blocks) / (code points of both). With autojunk, as by default in
// Python, a `b` of 200 or more does not start a match at a code point that is more than a
// hundredth of it: long texts that are almost equal may come out as 0.
double sequence_ratio(std::u32string_view a, std::u32string_view b, bool autojunk = true);

}  // namespace bitdecoding::eval
