// SPDX-License-Identifier: Apache-2.0
// ROUGE-L of summaries as the Python package `rouge` 1.0.1 has it, to the last digit: sentences end
// at full stops, words are counted once, the longest common subsequences are united as sets.
#pragma once

#include <string_view>

namespace bitdecoding::eval {

struct RougeL {
  double f = 0.0;
  // The most steps that a walk back through one table took. The package walks by recursion and
  // fails above Python's limit of 1,000, which the benchmark's runner scores as 0.
  std::size_t longest_walk = 0;
};

// 0 when one of the texts has no sentence.
RougeL rouge_l(std::u32string_view summary, std::u32string_view reference);

}  // namespace bitdecoding::eval
