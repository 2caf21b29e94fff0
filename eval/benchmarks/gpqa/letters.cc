// SPDX-License-Identifier: Apache-2.0
// Which letter a reply means.
#include <cctype>
#include <cstdint>
#include <numeric>

#include "benchmarks/gpqa/gpqa.h"
#include "benchmarks/text/boxed.h"
#include "calibrate/words.h"

namespace bitdecoding::eval {
namespace {

constexpr std::string_view kAnswer = "answer";

char upper(char c) { return static_cast<char>(std::toupper(static_cast<unsigned char>(c))); }
bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }
bool is_choice(char c) { return upper(c) >= 'A' && upper(c) <= 'D'; }

// Where the next "answer" begins, letter case aside.
std::size_t find_answer(std::string_view text, std::size_t from) {
  for (std::size_t at = from; at + kAnswer.size() <= text.size(); ++at) {
    std::size_t i = 0;
    while (i < kAnswer.size() &&
           std::tolower(static_cast<unsigned char>(text[at + i])) == kAnswer[i]) {
      ++i;
    }
    if (i == kAnswer.size()) return at;
  }
  return std::string_view::npos;
}

bool skip(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Bold, quotes, brackets and LaTeX that may stand around a letter.
void skip_marks(std::string_view& text) {
  while (!text.empty()) {
    const std::size_t before = text.size();
    for (const std::string_view mark :
         {"\\boxed", "\\textbf", "\\text", "\\mathbf", "\\mathrm", "\\(", "\\["}) {
      skip(text, mark);
    }
    const std::size_t plain = text.find_first_not_of(" \t\r\n*_`'\"$([{");
    text.remove_prefix(std::min(plain, text.size()));
    if (text.size() == before) return;
  }
}

// The choice at the start of `text`: a letter that is a word of its own. A small one must not go
// on as a sentence does ("a common mistake").
char leading_choice(std::string_view text) {
  skip_marks(text);
  if (text.empty() || !is_choice(text[0])) return 0;
  if (text.size() == 1) return upper(text[0]);
  const char next = text[1];
  const bool word_goes_on = is_letter(next) || std::isdigit(static_cast<unsigned char>(next)) ||
                            next == '\'' || (static_cast<unsigned char>(next) & 0x80U) != 0;
  if (word_goes_on) return 0;
  const bool small = text[0] != upper(text[0]);
  if (small && next == ' ' && text.size() > 2 && is_letter(text[2])) return 0;
  return upper(text[0]);
}

// Behind "Answer": the colon or the "is" after which the letter stands; false when neither does.
bool skip_to_choice(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t*_`"), text.size()));
  const bool colon = skip(text, ":") || skip(text, "\uff1a");
  if (colon) return true;
  if (!skip(text, "is")) return false;
  skip(text, ":");
  return text.empty() || !is_letter(text[0]);
}

}  // namespace

char choice_letter(std::string_view answer) {
  const std::vector<std::string> boxed = boxes(answer);
  for (auto box = boxed.rbegin(); box != boxed.rend(); ++box) {
    if (const char letter = leading_choice(*box); letter != 0) return letter;
  }
  char last = 0;
  for (std::size_t at = find_answer(answer, 0); at != std::string_view::npos;
       at = find_answer(answer, at + 1)) {
    std::string_view rest = answer.substr(at + kAnswer.size());
    if (!skip_to_choice(rest)) continue;
    if (const char letter = leading_choice(rest); letter != 0) last = letter;
  }
  return last;
}

char simple_evals_letter(std::string_view answer) {
  for (std::size_t at = find_answer(answer, 0); at != std::string_view::npos;
       at = find_answer(answer, at + 1)) {
    std::string_view rest = answer.substr(at + kAnswer.size());
    rest.remove_prefix(std::min(rest.find_first_not_of(" \t"), rest.size()));
    if (!skip(rest, ":")) continue;
    rest.remove_prefix(std::min(rest.find_first_not_of(" \t"), rest.size()));
    skip(rest, "$");
    if (!rest.empty() && is_choice(rest[0])) return rest[0];
  }
  return 0;
}

std::array<int, 4> choice_order(std::string_view row_text) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : row_text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  Choice choice(hash);
  std::array<int, 4> order{};
  std::iota(order.begin(), order.end(), 0);
  for (int i = 3; i > 0; --i) {
    std::swap(order[static_cast<std::size_t>(i)],
              order[static_cast<std::size_t>(choice.below(i + 1))]);
  }
  return order;
}

}  // namespace bitdecoding::eval
