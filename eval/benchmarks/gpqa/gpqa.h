// SPDX-License-Identifier: Apache-2.0
// GPQA Diamond: one of four choices.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

std::unique_ptr<Benchmark> make_gpqa();

// 'A'..'D', or 0: the letter of the last box, else of the last "Answer: X"; bold, brackets and
// letter case do not matter.
char choice_letter(std::string_view answer);
// As openai/simple-evals: the first "Answer: X" without bold or brackets. In the case that it was
// written in: 'a' is not 'A' there.
char simple_evals_letter(std::string_view answer);
// Where the row's choices (0: the right one) stand: a permutation that the text alone decides.
std::array<int, 4> choice_order(std::string_view row_text);

}  // namespace bitdecoding::eval
