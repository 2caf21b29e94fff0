// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/longbench_pro/rouge.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

using Sentence = std::vector<std::uint32_t>;  // words by number

// Numbers words, so that a table compares integers.
class Words {
 public:
  std::uint32_t number(const std::u32string& word) {
    return numbers_.emplace(word, static_cast<std::uint32_t>(numbers_.size())).first->second;
  }

 private:
  std::unordered_map<std::u32string, std::uint32_t> numbers_;
};

// A piece between full stops that is only white space is a sentence of one empty word; an empty
// piece is none.
std::vector<Sentence> sentences(std::u32string_view text, Words& numbers) {
  std::vector<Sentence> out;
  for (const std::u32string_view piece : split(text, U'.')) {
    if (piece.empty()) continue;
    Sentence sentence;
    for (const std::u32string_view word : words(piece)) {
      sentence.push_back(numbers.number(std::u32string(word)));
    }
    if (sentence.empty()) sentence.push_back(numbers.number(U""));
    out.push_back(std::move(sentence));
  }
  return out;
}

std::size_t unique_words(const std::vector<Sentence>& text) {
  std::unordered_set<std::uint32_t> all;
  for (const Sentence& sentence : text) all.insert(sentence.begin(), sentence.end());
  return all.size();
}

class Subsequence {
 public:
  // Adds the words of a longest common subsequence to `into`; which one of several decides the
  // order of the walk. Returns its steps.
  std::size_t unite(const Sentence& reference, const Sentence& summary,
                    std::unordered_set<std::uint32_t>& into) {
    fill(reference, summary);
    std::size_t i = reference.size();
    std::size_t j = summary.size();
    std::size_t steps = 1;
    for (; i > 0 && j > 0; ++steps) {
      if (reference[i - 1] == summary[j - 1]) {
        into.insert(reference[i - 1]);
        --i;
        --j;
      } else if (at(i - 1, j) > at(i, j - 1)) {
        --i;
      } else {
        --j;
      }
    }
    return steps;
  }

 private:
  std::uint32_t& at(std::size_t i, std::size_t j) { return table_[i * width_ + j]; }

  void fill(const Sentence& reference, const Sentence& summary) {
    width_ = summary.size() + 1;
    table_.assign((reference.size() + 1) * width_, 0);
    for (std::size_t i = 1; i <= reference.size(); ++i) {
      for (std::size_t j = 1; j <= summary.size(); ++j) {
        at(i, j) = reference[i - 1] == summary[j - 1] ? at(i - 1, j - 1) + 1
                                                      : std::max(at(i - 1, j), at(i, j - 1));
      }
    }
  }

  std::size_t width_ = 0;
  std::vector<std::uint32_t> table_;
};

}  // namespace

RougeL rouge_l(std::u32string_view summary, std::u32string_view reference) {
  Words numbers;
  const std::vector<Sentence> given = sentences(summary, numbers);
  const std::vector<Sentence> wanted = sentences(reference, numbers);
  RougeL out;
  if (given.empty() || wanted.empty()) return out;
  std::unordered_set<std::uint32_t> common;
  Subsequence subsequence;
  for (const Sentence& from : wanted) {
    for (const Sentence& in : given) {
      out.longest_walk = std::max(out.longest_walk, subsequence.unite(from, in, common));
    }
  }
  const auto shared = static_cast<double>(common.size());
  const double recall = shared / static_cast<double>(unique_words(wanted));
  const double precision = shared / static_cast<double>(unique_words(given));
  out.f = 2.0 * ((precision * recall) / (precision + recall + 1e-8));
  return out;
}

}  // namespace bitdecoding::eval
